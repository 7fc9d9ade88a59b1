// HostDevice: a "card" of host memory with the rules of the CUDA driver, for machines without one.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "card_file.hpp"
#include "vmm.hpp"

namespace kvcached_dist {

// Physical memory is a memfd: create commits a piece of it with fallocate, release punches the hole, map and
// unmap replace pages of a PROT_NONE range. Unbacked addresses fault, and what is released leaves the process.
// Stricter than it has to be, like the driver: whole handles only, no mapping over a mapping, no release of a
// mapped handle, no freeing of addresses under a mapping.
class HostDevice final : public Device {
 public:
  // `card_file` may be empty: then the capacity is this device's alone. Throws std::invalid_argument or
  // std::system_error; start-up is the only place where a device may throw.
  HostDevice(std::uint64_t capacity_bytes, std::uint64_t granule_bytes, std::string card, const std::string& card_file);
  ~HostDevice() override;
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;
  HostDevice(HostDevice&&) = delete;
  HostDevice& operator=(HostDevice&&) = delete;

  Result memory_info(MemoryInfo& info) override;
  [[nodiscard]] std::string explain(int code) const override;
  // What the kernel has really committed to the memfd.
  [[nodiscard]] std::uint64_t resident_bytes() const;

 private:
  struct Allocation {
    std::uint64_t bytes = 0;
    bool mapped = false;
  };
  struct Mapping {
    std::uint64_t bytes = 0;
    Handle handle = 0;
  };

  Result do_reserve(std::uint64_t bytes, Address& address) override;
  Result do_free_address(Address address, std::uint64_t bytes) override;
  Result do_create(std::uint64_t bytes, Handle& handle) override;
  Result do_release(Handle handle, std::uint64_t bytes) override;
  Result do_map(Address address, std::uint64_t bytes, Handle handle) override;
  Result do_access(Address address, std::uint64_t bytes) override;
  Result do_unmap(Address address, std::uint64_t bytes) override;
  Result do_fill(const StridedFill& fill) override;
  Result do_finish_fills() override;

  Result charge(std::uint64_t bytes);
  void refund(std::uint64_t bytes);
  [[nodiscard]] bool is_granular(std::uint64_t bytes) const { return bytes > 0 && bytes % granule_bytes() == 0; }
  [[nodiscard]] bool is_reserved(Address address, std::uint64_t bytes) const;
  [[nodiscard]] bool overlaps_mapping(Address address, std::uint64_t bytes) const;

  std::uint64_t capacity_bytes_;
  int memfd_ = -1;
  std::unique_ptr<CardFile> card_file_;

  mutable std::mutex mutex_;
  std::uint64_t committed_bytes_ = 0;
  std::uint64_t next_offset_;  // in the memfd; never used twice, so that a stale handle is always recognised
  std::unordered_map<Handle, Allocation> allocations_;  // by offset in the memfd
  std::map<Address, Mapping> mappings_;
  std::map<Address, std::uint64_t> reservations_;
};

}  // namespace kvcached_dist
