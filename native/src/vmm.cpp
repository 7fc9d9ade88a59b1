#include "vmm.hpp"

#include <unistd.h>

namespace kvcached_dist {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

Result injected(Call call) { return {.status = Status::kInjected, .call = call, .code = 0}; }

// The backends only say status and code; which call it was is known here.
Result named(Result result, Call call) {
  result.call = call;
  return result;
}

}  // namespace

Device::Device(DeviceKind kind, int ordinal) : kind_(kind), ordinal_(ordinal), owner_pid_(::getpid()) {}

bool Device::in_owner_process() const { return ::getpid() == owner_pid_; }

Result Device::reserve(std::uint64_t bytes, Address& address) {
  if (faults_.strikes(Call::kReserve)) return injected(Call::kReserve);
  const Result result = named(do_reserve(bytes, address), Call::kReserve);
  if (result.ok()) live_reservations_.fetch_add(1, kRelaxed);
  return result;
}

Result Device::free_address(Address address, std::uint64_t bytes) {
  const Result result = named(do_free_address(address, bytes), Call::kReserve);
  if (result.ok()) live_reservations_.fetch_sub(1, kRelaxed);
  return result;
}

Result Device::create(std::uint64_t bytes, Handle& handle) {
  if (faults_.strikes(Call::kCreate)) return injected(Call::kCreate);
  const Result result = named(do_create(bytes, handle), Call::kCreate);
  if (result.ok()) {
    handles_created_.fetch_add(1, kRelaxed);
    live_created_bytes_.fetch_add(bytes, kRelaxed);
  }
  return result;
}

Result Device::release(Handle handle, std::uint64_t bytes) {
  if (faults_.strikes(Call::kRelease)) return injected(Call::kRelease);
  const Result result = named(do_release(handle, bytes), Call::kRelease);
  if (result.ok()) {
    handles_released_.fetch_add(1, kRelaxed);
    live_created_bytes_.fetch_sub(bytes, kRelaxed);
  }
  return result;
}

Result Device::map(Address address, std::uint64_t bytes, Handle handle) {
  if (faults_.strikes(Call::kMap)) return injected(Call::kMap);
  const Result result = named(do_map(address, bytes, handle), Call::kMap);
  if (result.ok()) {
    maps_.fetch_add(1, kRelaxed);
    live_mapped_bytes_.fetch_add(bytes, kRelaxed);
  }
  return result;
}

Result Device::access(Address address, std::uint64_t bytes) {
  if (faults_.strikes(Call::kAccess)) return injected(Call::kAccess);
  const Result result = named(do_access(address, bytes), Call::kAccess);
  if (result.ok()) accesses_.fetch_add(1, kRelaxed);
  return result;
}

Result Device::unmap(Address address, std::uint64_t bytes) {
  if (faults_.strikes(Call::kUnmap)) return injected(Call::kUnmap);
  const Result result = named(do_unmap(address, bytes), Call::kUnmap);
  if (result.ok()) {
    unmaps_.fetch_add(1, kRelaxed);
    live_mapped_bytes_.fetch_sub(bytes, kRelaxed);
  }
  return result;
}

Result Device::fill(const StridedFill& fill) {
  if (faults_.strikes(Call::kFill)) return injected(Call::kFill);
  const Result result = named(do_fill(fill), Call::kFill);
  if (result.ok()) fills_.fetch_add(1, kRelaxed);
  return result;
}

Result Device::finish_fills() { return named(do_finish_fills(), Call::kFill); }

Counters Device::counters() const {
  return {
      .handles_created = handles_created_.load(kRelaxed),
      .handles_released = handles_released_.load(kRelaxed),
      .maps = maps_.load(kRelaxed),
      .accesses = accesses_.load(kRelaxed),
      .fills = fills_.load(kRelaxed),
      .unmaps = unmaps_.load(kRelaxed),
      .live_created_bytes = live_created_bytes_.load(kRelaxed),
      .live_mapped_bytes = live_mapped_bytes_.load(kRelaxed),
      .live_reservations = live_reservations_.load(kRelaxed),
  };
}

}  // namespace kvcached_dist
