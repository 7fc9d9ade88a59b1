// CardFile: lets several processes share the capacity of one simulated card.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "vmm.hpp"

namespace kvcached_dist {

// A small file of owner slots (pid, start time of that pid, bytes), mapped by every owner and changed only
// under flock. An owner that died without giving its memory back is swept: like on a real card, memory ends
// with the process that held it. Thread-safe.
class CardFile {
 public:
  // Joins the card at `path`, creating the file if needed. Empty on failure, with the reason in `error`.
  static std::unique_ptr<CardFile> join(const std::string& path, std::uint64_t capacity_bytes, std::string& error);
  ~CardFile();
  CardFile(const CardFile&) = delete;
  CardFile& operator=(const CardFile&) = delete;
  CardFile(CardFile&&) = delete;
  CardFile& operator=(CardFile&&) = delete;

  // Takes `bytes` of the card for this owner; kOutOfMemory if the live owners leave less than that.
  Result charge(std::uint64_t bytes);
  // Gives `bytes` of this owner back. Cannot fail: the own slot is written by this owner only.
  void refund(std::uint64_t bytes);
  // Capacity minus what live owners hold.
  Result free_bytes(std::uint64_t& free_bytes);

 private:
  struct Layout;
  CardFile() = default;

  [[nodiscard]] std::uint64_t owned_bytes() const;
  void sweep_dead_owners();

  int fd_ = -1;
  Layout* layout_ = nullptr;
  std::uint32_t slot_ = 0;
  int owner_pid_ = 0;
};

}  // namespace kvcached_dist
