// Status codes of every call that touches memory. Nothing below the Python module throws or aborts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace kvcached_dist {

enum class Status : std::uint8_t {
  kOk = 0,
  kOutOfMemory = 1,      // the card (or the host) has no memory for this now; an ordinary miss
  kInvalidArgument = 2,  // the request contradicts what is reserved, held or mapped; nothing was done
  kDriverError = 3,      // anything else that the driver or the kernel refused
  kInjected = 4,         // a FaultHook made this call fail; the driver was not asked
};

// The calls that can be refused, that are counted, and that a FaultHook can make fail.
enum class Call : std::uint8_t { kReserve = 0, kCreate, kMap, kAccess, kFill, kUnmap, kRelease };

inline constexpr std::size_t kCallCount = 7;
inline constexpr std::array<std::string_view, kCallCount> kCallNames = {"reserve", "create", "map",    "access",
                                                                        "fill",    "unmap",  "release"};

constexpr std::size_t index_of(Call call) { return static_cast<std::size_t>(call); }
constexpr std::string_view name_of(Call call) { return kCallNames[index_of(call)]; }

inline std::optional<Call> call_named(std::string_view name) {
  for (std::size_t i = 0; i < kCallCount; ++i) {
    if (kCallNames[i] == name) return static_cast<Call>(i);
  }
  return std::nullopt;
}

// What one call answered. `code` is the driver's or the kernel's own number (CUresult or errno), 0 if none.
struct Result {
  Status status = Status::kOk;
  Call call = Call::kReserve;
  int code = 0;

  [[nodiscard]] bool ok() const { return status == Status::kOk; }
};

}  // namespace kvcached_dist
