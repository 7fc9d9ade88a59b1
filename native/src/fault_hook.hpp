// Makes chosen calls of a device fail or take longer, so that tests can show what happens then.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "status.hpp"

namespace kvcached_dist {

// Thread-safe. While nothing is armed a call costs one relaxed atomic load, and is not counted in `seen`.
class FaultHook {
 public:
  struct Fault {
    Call call = Call::kCreate;
    std::uint64_t nth = 1;    // first call to hit, counted from arming, 1-based
    std::uint64_t count = 1;  // how many consecutive calls to hit
    std::chrono::microseconds delay{0};
    bool fail = true;
  };
  using Totals = std::array<std::uint64_t, kCallCount>;

  void arm(const Fault& fault) {
    const std::scoped_lock lock(mutex_);
    armed_.push_back({.fault = fault});
    active_.store(true, std::memory_order_relaxed);
  }

  void clear() {
    const std::scoped_lock lock(mutex_);
    armed_.clear();
    active_.store(false, std::memory_order_relaxed);
  }

  Totals hits() const {
    const std::scoped_lock lock(mutex_);
    return hits_;
  }

  Totals seen() const {
    const std::scoped_lock lock(mutex_);
    return seen_;
  }

  // To be asked before every driver call. Returns true if the call must fail without reaching the driver.
  bool strikes(Call call) { return active_.load(std::memory_order_relaxed) && strikes_armed(call); }

 private:
  struct Armed {
    Fault fault;
    std::uint64_t calls = 0;
  };

  bool strikes_armed(Call call) {
    std::chrono::microseconds delay{0};
    bool fail = false;
    {
      const std::scoped_lock lock(mutex_);
      ++seen_[index_of(call)];
      bool hit = false;
      for (Armed& armed : armed_) {
        if (armed.fault.call != call) continue;
        ++armed.calls;
        if (armed.calls < armed.fault.nth) continue;
        hit = true;
        delay += armed.fault.delay;
        fail = fail || armed.fault.fail;
      }
      if (hit) ++hits_[index_of(call)];
      std::erase_if(armed_, [](const Armed& armed) { return armed.calls >= armed.fault.nth + armed.fault.count - 1; });
      active_.store(!armed_.empty(), std::memory_order_relaxed);
    }
    // Outside the lock: a slow call on one thread must not hold up the others.
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    return fail;
  }

  std::atomic<bool> active_{false};
  mutable std::mutex mutex_;
  std::vector<Armed> armed_;
  Totals hits_{};
  Totals seen_{};
};

}  // namespace kvcached_dist
