#include "host_vmm.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace kvcached_dist {
namespace {

constexpr std::uint64_t kBlockBytes = 512;  // unit of st_blocks, whatever the file system
constexpr auto kOffsetMax = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());

// The backends leave Result::call alone; Device knows which call it was.
Result invalid() { return {.status = Status::kInvalidArgument, .code = EINVAL}; }
Result driver_error(int code) { return {.status = Status::kDriverError, .code = code}; }
Result out_of_memory(int code) { return {.status = Status::kOutOfMemory, .code = code}; }

// NOLINTBEGIN(performance-no-int-to-ptr): addresses are integers in Device, as in the driver's interface
void* pointer(Address address) { return reinterpret_cast<void*>(address); }
// NOLINTEND(performance-no-int-to-ptr)

std::string default_card_id() {
  static std::atomic<int> next{0};
  return "host-" + std::to_string(::getpid()) + "-" + std::to_string(next.fetch_add(1));
}

void fill_row(unsigned char* start, std::uint64_t bytes, std::uint32_t pattern) {
  if (is_uniform(pattern)) {
    std::memset(start, static_cast<int>(pattern & 0xFFU), bytes);
    return;
  }
  auto* words = reinterpret_cast<std::uint32_t*>(start);
  std::fill_n(words, bytes / sizeof(pattern), pattern);
}

}  // namespace

HostDevice::HostDevice(std::uint64_t capacity_bytes, std::uint64_t granule_bytes, std::string card,
                       const std::string& card_file)
    : Device(DeviceKind::kHost, 0), capacity_bytes_(capacity_bytes), next_offset_(granule_bytes) {
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (!std::has_single_bit(granule_bytes) || granule_bytes < page_bytes) {
    throw std::invalid_argument("granule_bytes=" + std::to_string(granule_bytes) +
                                " is not a power of two of at least " + std::to_string(page_bytes) +
                                " bytes; 2097152 works");
  }
  if (capacity_bytes < granule_bytes) {
    throw std::invalid_argument("capacity_bytes=" + std::to_string(capacity_bytes) + " is less than one granule of " +
                                std::to_string(granule_bytes) + " bytes");
  }
  if (!card_file.empty()) {
    std::string error;
    card_file_ = CardFile::join(card_file, capacity_bytes, error);
    if (card_file_ == nullptr) throw std::invalid_argument(error);
  }
  set_granule_bytes(granule_bytes);
  if (card.empty() && card_file.empty()) set_private();
  if (card.empty()) card = card_file.empty() ? default_card_id() : card_file;
  set_card_id(std::move(card));
  memfd_ = ::memfd_create("kvcached_dist", MFD_CLOEXEC);
  if (memfd_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
}

HostDevice::~HostDevice() {
  if (in_owner_process()) {
    for (const auto& [address, bytes] : reservations_) ::munmap(pointer(address), bytes);
  }
  ::close(memfd_);
}

Result HostDevice::memory_info(MemoryInfo& info) {
  info.total_bytes = capacity_bytes_;
  if (card_file_ != nullptr) return card_file_->free_bytes(info.free_bytes);
  const std::scoped_lock lock(mutex_);
  info.free_bytes = capacity_bytes_ - committed_bytes_;
  return {};
}

std::string HostDevice::explain(int code) const { return code == 0 ? "no error" : std::strerror(code); }

std::uint64_t HostDevice::resident_bytes() const {
  struct stat info{};
  return ::fstat(memfd_, &info) == 0 ? static_cast<std::uint64_t>(info.st_blocks) * kBlockBytes : 0;
}

Result HostDevice::charge(std::uint64_t bytes) {
  if (card_file_ != nullptr) return card_file_->charge(bytes);
  const std::scoped_lock lock(mutex_);
  if (bytes > capacity_bytes_ - committed_bytes_) return out_of_memory(ENOMEM);
  committed_bytes_ += bytes;
  return {};
}

void HostDevice::refund(std::uint64_t bytes) {
  if (card_file_ != nullptr) {
    card_file_->refund(bytes);
    return;
  }
  const std::scoped_lock lock(mutex_);
  committed_bytes_ -= bytes;
}

bool HostDevice::is_reserved(Address address, std::uint64_t bytes) const {
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  return address - start <= length && bytes <= length - (address - start);
}

bool HostDevice::overlaps_mapping(Address address, std::uint64_t bytes) const {
  const auto after = mappings_.lower_bound(address);
  if (after != mappings_.end() && after->first < address + bytes) return true;
  if (after == mappings_.begin()) return false;
  const auto& [start, mapping] = *std::prev(after);
  return start + mapping.bytes > address;
}

Result HostDevice::do_reserve(std::uint64_t bytes, Address& address) {
  const std::uint64_t granule = granule_bytes();
  if (!is_granular(bytes)) return invalid();
  // mmap aligns to the kernel's page only: take one granule more and give the ends back.
  const std::uint64_t padded = bytes + granule;
  void* raw = ::mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return out_of_memory(errno);
  const auto start = reinterpret_cast<Address>(raw);
  const Address aligned = (start + granule - 1) & ~(granule - 1);
  if (aligned > start) ::munmap(raw, aligned - start);
  const std::uint64_t tail = start + padded - (aligned + bytes);
  if (tail > 0) ::munmap(pointer(aligned + bytes), tail);
  const std::scoped_lock lock(mutex_);
  reservations_.emplace(aligned, bytes);
  address = aligned;
  return {};
}

Result HostDevice::do_free_address(Address address, std::uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != bytes || overlaps_mapping(address, bytes)) return invalid();
  if (::munmap(pointer(address), bytes) != 0) return driver_error(errno);
  reservations_.erase(found);
  return {};
}

Result HostDevice::do_create(std::uint64_t bytes, Handle& handle) {
  if (!is_granular(bytes)) return invalid();
  std::uint64_t offset = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (bytes > kOffsetMax - next_offset_) return driver_error(EFBIG);
    offset = next_offset_;
    next_offset_ += bytes;
  }
  const Result charged = charge(bytes);
  if (!charged.ok()) return charged;
  // Committing zeroes the pages and takes a while: other threads may go on.
  const auto start = static_cast<off_t>(offset);
  const auto length = static_cast<off_t>(bytes);
  int code = 0;
  do {
    code = ::fallocate(memfd_, 0, start, length) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0) {
    ::fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, length);
    refund(bytes);
    return code == ENOSPC || code == ENOMEM ? out_of_memory(code) : driver_error(code);
  }
  const std::scoped_lock lock(mutex_);
  allocations_.emplace(offset, Allocation{.bytes = bytes});
  handle = offset;
  return {};
}

Result HostDevice::do_release(Handle handle, std::uint64_t bytes) {
  {
    const std::scoped_lock lock(mutex_);
    const auto found = allocations_.find(handle);
    if (found == allocations_.end() || found->second.bytes != bytes || found->second.mapped) return invalid();
    if (::fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(handle),
                    static_cast<off_t>(bytes)) != 0) {
      return driver_error(errno);
    }
    allocations_.erase(found);
  }
  refund(bytes);
  return {};
}

Result HostDevice::do_map(Address address, std::uint64_t bytes, Handle handle) {
  const std::scoped_lock lock(mutex_);
  const auto found = allocations_.find(handle);
  if (found == allocations_.end() || found->second.bytes != bytes || found->second.mapped) return invalid();
  if (address % granule_bytes() != 0 || !is_reserved(address, bytes) || overlaps_mapping(address, bytes)) {
    return invalid();
  }
  void* mapped = ::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memfd_, static_cast<off_t>(handle));
  if (mapped == MAP_FAILED) return driver_error(errno);
  found->second.mapped = true;
  mappings_.emplace(address, Mapping{.bytes = bytes, .handle = handle});
  return {};
}

Result HostDevice::do_access(Address address, std::uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.bytes != bytes) return invalid();
  if (::mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) != 0) return driver_error(errno);
  return {};
}

Result HostDevice::do_unmap(Address address, std::uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.bytes != bytes) return invalid();
  void* blank =
      ::mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (blank == MAP_FAILED) return driver_error(errno);
  allocations_[found->second.handle].mapped = false;
  mappings_.erase(found);
  return {};
}

Result HostDevice::do_fill(const StridedFill& fill) {
  auto* row = static_cast<unsigned char*>(pointer(fill.start));
  for (std::uint64_t i = 0; i < fill.rows; ++i, row += fill.row_bytes) fill_row(row, fill.bytes, fill.pattern);
  return {};
}

Result HostDevice::do_finish_fills() { return {}; }

}  // namespace kvcached_dist
