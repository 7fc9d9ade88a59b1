// Bitmap: a set of small integers with the lowest member found in a few steps, whatever the size.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <vector>

namespace kvcached_dist {

// Each level has one bit per non-zero word of the level below; the top level is a single word.
class Bitmap {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  static constexpr std::size_t kWordBits = 64;

  explicit Bitmap(std::size_t size) {
    do {
      size = (size + kWordBits - 1) / kWordBits;
      levels_.emplace_back(size);
    } while (size > 1);
  }

  void set(std::size_t bit) { set_word(bit / kWordBits, std::uint64_t{1} << (bit % kWordBits)); }

  void clear(std::size_t bit) { clear_word(bit / kWordBits, std::uint64_t{1} << (bit % kWordBits)); }

  // Adds the members of a whole word at once: bit i of `mask` is member kWordBits * word + i.
  void set_word(std::size_t word, std::uint64_t mask) {
    const bool was_empty = levels_[0][word] == 0;
    levels_[0][word] |= mask;
    if (!was_empty || mask == 0) return;
    for (std::size_t level = 1; level < levels_.size(); ++level) {
      std::uint64_t& above = levels_[level][word / kWordBits];
      const bool was_set = above != 0;
      above |= std::uint64_t{1} << (word % kWordBits);
      if (was_set) return;
      word /= kWordBits;
    }
  }

  // Removes the members of `mask` from a word.
  void clear_word(std::size_t word, std::uint64_t mask) {
    if (mask == 0) return;
    levels_[0][word] &= ~mask;
    if (levels_[0][word] != 0) return;
    for (std::size_t level = 1; level < levels_.size(); ++level) {
      std::uint64_t& above = levels_[level][word / kWordBits];
      above &= ~(std::uint64_t{1} << (word % kWordBits));
      if (above != 0) return;
      word /= kWordBits;
    }
  }

  [[nodiscard]] std::uint64_t word(std::size_t index) const { return levels_[0][index]; }

  [[nodiscard]] std::size_t lowest() const {
    if (levels_.empty() || levels_.back().empty() || levels_.back()[0] == 0) return kNone;
    std::size_t at = 0;
    for (const auto& level : std::views::reverse(levels_)) {
      at = at * kWordBits + static_cast<std::size_t>(std::countr_zero(level[at]));
    }
    return at;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;
};

}  // namespace kvcached_dist
