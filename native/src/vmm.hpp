// Device: the virtual-memory calls of one card, as status codes. HostDevice and CudaDevice implement it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "fault_hook.hpp"
#include "status.hpp"

namespace kvcached_dist {

using Address = std::uintptr_t;
using Handle = std::uint64_t;

// Writes `pattern` over `bytes` at the start of each of `rows` rows that begin `row_bytes` apart.
// A pattern whose four bytes differ needs start, row_bytes and bytes to be multiples of four.
struct StridedFill {
  Address start = 0;
  std::uint64_t rows = 1;
  std::uint64_t row_bytes = 0;
  std::uint64_t bytes = 0;
  std::uint32_t pattern = 0;
};

constexpr bool is_uniform(std::uint32_t pattern) { return pattern == (pattern & 0xFFU) * 0x01010101U; }

struct MemoryInfo {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

// What a device has done so far (sums), and what is alive now (`live_*`).
struct Counters {
  std::uint64_t handles_created = 0;
  std::uint64_t handles_released = 0;
  std::uint64_t maps = 0;
  std::uint64_t accesses = 0;
  std::uint64_t fills = 0;
  std::uint64_t unmaps = 0;
  std::uint64_t live_created_bytes = 0;
  std::uint64_t live_mapped_bytes = 0;
  std::uint64_t live_reservations = 0;
};

enum class DeviceKind : std::uint8_t { kHost, kCuda };

// Thread-safe. Public calls ask the fault hook, count, and delegate to the private do_* of the backend.
// A call that fails has changed nothing.
class Device {
 public:
  Device(DeviceKind kind, int ordinal);
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  Device(Device&&) = delete;
  Device& operator=(Device&&) = delete;

  // Address ranges: nothing behind them until something is mapped.
  Result reserve(std::uint64_t bytes, Address& address);
  Result free_address(Address address, std::uint64_t bytes);

  // Physical memory, in multiples of the granule. Released memory is back on the card when the call returns.
  Result create(std::uint64_t bytes, Handle& handle);
  Result release(Handle handle, std::uint64_t bytes);

  // Mappings: always a whole handle at its offset 0. Readable and writable only after access().
  Result map(Address address, std::uint64_t bytes, Handle handle);
  Result access(Address address, std::uint64_t bytes);
  Result unmap(Address address, std::uint64_t bytes);

  // Fills are queued; finish_fills() returns when all fills queued before it are in memory.
  Result fill(const StridedFill& fill);
  Result finish_fills();

  virtual Result memory_info(MemoryInfo& info) = 0;
  // A driver or kernel code in words.
  [[nodiscard]] virtual std::string explain(int code) const = 0;

  [[nodiscard]] DeviceKind kind() const { return kind_; }
  [[nodiscard]] int ordinal() const { return ordinal_; }
  [[nodiscard]] std::uint64_t granule_bytes() const { return granule_bytes_; }
  [[nodiscard]] const std::string& card_id() const { return card_id_; }
  // No other device object, in this process or another, can use the card's memory.
  [[nodiscard]] bool is_private() const { return private_; }
  [[nodiscard]] Counters counters() const;
  // A forked child shares the memory but not the right to give it back.
  [[nodiscard]] bool in_owner_process() const;
  FaultHook& faults() { return faults_; }

 protected:
  void set_granule_bytes(std::uint64_t bytes) { granule_bytes_ = bytes; }
  void set_card_id(std::string id) { card_id_ = std::move(id); }
  void set_private() { private_ = true; }

 private:
  virtual Result do_reserve(std::uint64_t bytes, Address& address) = 0;
  virtual Result do_free_address(Address address, std::uint64_t bytes) = 0;
  virtual Result do_create(std::uint64_t bytes, Handle& handle) = 0;
  virtual Result do_release(Handle handle, std::uint64_t bytes) = 0;
  virtual Result do_map(Address address, std::uint64_t bytes, Handle handle) = 0;
  virtual Result do_access(Address address, std::uint64_t bytes) = 0;
  virtual Result do_unmap(Address address, std::uint64_t bytes) = 0;
  virtual Result do_fill(const StridedFill& fill) = 0;
  virtual Result do_finish_fills() = 0;

  DeviceKind kind_;
  int ordinal_;
  int owner_pid_;
  std::uint64_t granule_bytes_ = 0;
  std::string card_id_;
  bool private_ = false;
  FaultHook faults_;

  std::atomic<std::uint64_t> handles_created_{0};
  std::atomic<std::uint64_t> handles_released_{0};
  std::atomic<std::uint64_t> maps_{0};
  std::atomic<std::uint64_t> accesses_{0};
  std::atomic<std::uint64_t> fills_{0};
  std::atomic<std::uint64_t> unmaps_{0};
  std::atomic<std::uint64_t> live_created_bytes_{0};
  std::atomic<std::uint64_t> live_mapped_bytes_{0};
  std::atomic<std::uint64_t> live_reservations_{0};
};

}  // namespace kvcached_dist
