#include "card_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

namespace kvcached_dist {
namespace {

constexpr std::uint64_t kMagic = 0x6b76636472646331;  // "kvcdrdc1"; the last byte is the version
constexpr std::uint32_t kSlotsMax = 256;
// Holders need microseconds. Whoever holds the lock longer is stopped, and must not stop us as well.
constexpr std::chrono::milliseconds kLockDeadline{1000};
constexpr std::chrono::microseconds kLockPoll{50};

struct Slot {
  std::int64_t pid;
  std::uint64_t start_ticks;
  std::atomic<std::uint64_t> bytes;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "slots are shared between processes");

// Start time of a live process in clock ticks since boot, 0 if it is gone. A zombie has freed its memory.
std::uint64_t start_ticks_of(std::int64_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);  // NOLINT(cppcoreguidelines-pro-type-vararg)
  if (fd < 0) return 0;
  std::array<char, 1024> buffer{};
  const ssize_t length = ::read(fd, buffer.data(), buffer.size());
  ::close(fd);
  if (length <= 0) return 0;
  std::string_view text(buffer.data(), static_cast<std::size_t>(length));
  // The second field is the program's name in parentheses and may hold anything: go on after the last one.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string_view::npos || name_end + 2 >= text.size()) return 0;
  text.remove_prefix(name_end + 2);
  if (text.front() == 'Z' || text.front() == 'X') return 0;
  constexpr int kFieldsBeforeStart = 19;  // state is field 3, start time field 22
  for (int field = 0; field < kFieldsBeforeStart; ++field) {
    const std::size_t space = text.find(' ');
    if (space == std::string_view::npos) return 0;
    text.remove_prefix(space + 1);
  }
  std::uint64_t ticks = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), ticks);
  return parsed.ec == std::errc{} ? ticks : 0;
}

// flock with a deadline. The kernel gives the lock back when its holder dies.
class FileLock {
 public:
  explicit FileLock(int fd) : fd_(fd) {
    const auto deadline = std::chrono::steady_clock::now() + kLockDeadline;
    while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) {
        error_ = errno;
        return;
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        error_ = ETIMEDOUT;
        return;
      }
      std::this_thread::sleep_for(kLockPoll);
    }
    held_ = true;
  }
  ~FileLock() {
    if (held_) ::flock(fd_, LOCK_UN);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  FileLock(FileLock&&) = delete;
  FileLock& operator=(FileLock&&) = delete;

  [[nodiscard]] bool held() const { return held_; }
  [[nodiscard]] int error() const { return error_; }

 private:
  int fd_;
  bool held_ = false;
  int error_ = 0;
};

}  // namespace

struct CardFile::Layout {
  std::uint64_t magic;
  std::uint64_t capacity_bytes;
  std::array<Slot, kSlotsMax> slots;
};

std::unique_ptr<CardFile> CardFile::join(const std::string& path, std::uint64_t capacity_bytes, std::string& error) {
  std::unique_ptr<CardFile> card(new CardFile());
  const auto failed = [&](const std::string& what) {
    error = "card file " + path + ": " + what;
    return nullptr;
  };
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-vararg): open(2) is variadic
  card->fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (card->fd_ < 0) return failed(std::string("cannot be opened: ") + std::strerror(errno));
  // A descriptor is an own lock owner even inside one process, so devices of one process exclude each other.
  const FileLock lock(card->fd_);
  if (!lock.held()) return failed(std::string("cannot be locked: ") + std::strerror(lock.error()));

  struct stat info{};
  if (::fstat(card->fd_, &info) != 0 || !S_ISREG(info.st_mode)) return failed("is not a regular file");
  const bool fresh = info.st_size == 0;
  if (!fresh && !std::cmp_equal(info.st_size, sizeof(Layout))) return failed("is not a card file");
  if (fresh && ::ftruncate(card->fd_, sizeof(Layout)) != 0) return failed(std::strerror(errno));
  void* mapped = ::mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, card->fd_, 0);
  if (mapped == MAP_FAILED) return failed(std::string("cannot be mapped: ") + std::strerror(errno));
  card->layout_ = static_cast<Layout*>(mapped);
  Layout& layout = *card->layout_;
  if (!fresh && layout.magic != kMagic && layout.magic != 0) return failed("is not a card file");

  card->sweep_dead_owners();
  std::uint32_t owners = 0;
  std::uint32_t slot = kSlotsMax;
  for (std::uint32_t i = kSlotsMax; i-- > 0;) {
    if (layout.slots[i].pid != 0) ++owners;
    if (layout.slots[i].pid == 0) slot = i;
  }
  if (owners == 0) layout.capacity_bytes = capacity_bytes;
  if (layout.capacity_bytes != capacity_bytes) {
    return failed("is in use with a capacity of " + std::to_string(layout.capacity_bytes) + " bytes, not " +
                  std::to_string(capacity_bytes) + "; give all owners of a card the same capacity");
  }
  if (slot == kSlotsMax) return failed("has no free slot; at most " + std::to_string(kSlotsMax) + " owners");
  layout.magic = kMagic;
  card->slot_ = slot;
  card->owner_pid_ = ::getpid();
  layout.slots[slot].bytes.store(0);
  layout.slots[slot].start_ticks = start_ticks_of(card->owner_pid_);
  layout.slots[slot].pid = card->owner_pid_;
  return card;
}

CardFile::~CardFile() {
  if (layout_ != nullptr) {
    if (owner_pid_ == ::getpid()) {
      const FileLock lock(fd_);
      // Without the lock the slot stays taken until this process ends; then anybody sweeps it.
      if (lock.held()) layout_->slots[slot_].pid = 0;
    }
    ::munmap(layout_, sizeof(Layout));
  }
  if (fd_ >= 0) ::close(fd_);
}

std::uint64_t CardFile::owned_bytes() const {
  std::uint64_t sum = 0;
  for (const Slot& slot : layout_->slots) {
    if (slot.pid != 0) sum += slot.bytes.load();
  }
  return sum;
}

void CardFile::sweep_dead_owners() {
  for (Slot& slot : layout_->slots) {
    if (slot.pid != 0 && start_ticks_of(slot.pid) != slot.start_ticks) slot.pid = 0;
  }
}

Result CardFile::charge(std::uint64_t bytes) {
  const FileLock lock(fd_);
  if (!lock.held()) return {.status = Status::kDriverError, .code = lock.error()};
  const auto fits = [&] {
    const std::uint64_t owned = owned_bytes();
    return owned <= layout_->capacity_bytes && bytes <= layout_->capacity_bytes - owned;
  };
  if (!fits()) {
    sweep_dead_owners();  // reads /proc for every owner, hence only when it can change the answer
    if (!fits()) return {.status = Status::kOutOfMemory, .code = ENOMEM};
  }
  layout_->slots[slot_].bytes.fetch_add(bytes);
  return {};
}

void CardFile::refund(std::uint64_t bytes) { layout_->slots[slot_].bytes.fetch_sub(bytes); }

Result CardFile::free_bytes(std::uint64_t& free_bytes) {
  const FileLock lock(fd_);
  if (!lock.held()) return {.status = Status::kDriverError, .code = lock.error()};
  sweep_dead_owners();
  const std::uint64_t owned = owned_bytes();
  free_bytes = owned < layout_->capacity_bytes ? layout_->capacity_bytes - owned : 0;
  return {};
}

}  // namespace kvcached_dist
