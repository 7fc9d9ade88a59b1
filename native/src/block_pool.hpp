// BlockPool: hands out block ids as a pure function of the operations so far, hence equally on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bitmap.hpp"

namespace kvcached_dist {

// A block is taken from the fullest page (fewest free blocks, but not none), the lowest page id among equals,
// and the lowest block id in it. So nearly empty pages drain and can be retired. Only published pages count.
// Costs of alloc and free: a few steps per block, independent of the number of pages; pages of a single block, the
// usual case of token pages, are taken and given back a word of the bitmap at a time. Not thread-safe.
class BlockPool {
 public:
  // Throws std::invalid_argument.
  BlockPool(std::int64_t pages, std::int64_t blocks_per_page);

  // Each of these changes nothing if it throws std::invalid_argument.
  void publish(std::int64_t first_page, std::int64_t count);
  void retire(std::int64_t first_page, std::int64_t count);
  void free(std::span<const std::int64_t> blocks);

  // Fills `blocks`, or takes nothing and returns false if fewer are free.
  bool alloc(std::span<std::int64_t> blocks);
  void reset();

  // A block in use that is never freed. Throws std::invalid_argument unless it is in use.
  void pin(std::int64_t block);

  // Depends on the ids of the last alloc or free that succeeded, and on their order; equal wherever they are.
  [[nodiscard]] std::uint32_t ids_digest() const { return ids_digest_; }

  [[nodiscard]] bool run_is_free(std::int64_t first_page, std::int64_t count) const;
  [[nodiscard]] std::int64_t available() const { return available_; }
  [[nodiscard]] std::int64_t published() const { return published_pages_ * blocks_per_page_; }

 private:
  static constexpr std::int32_t kUnpublished = -1;

  void check_run(std::int64_t first_page, std::int64_t count) const;
  [[nodiscard]] bool is_in_use(std::int64_t block) const;
  [[nodiscard]] std::string complaint_about(std::int64_t block) const;
  void take_single(std::span<std::int64_t> blocks);
  void free_single(std::span<const std::int64_t> blocks);
  [[nodiscard]] std::size_t freeable_neighbours(std::span<const std::int64_t> blocks) const;
  void mark_single(std::size_t first, std::size_t count, bool free);
  void set_free_count(std::int64_t page, std::int32_t count);
  void mark_page(std::int64_t page, bool free);
  std::int64_t* take_from(std::int64_t page, std::int64_t* out, const std::int64_t* end);
  [[nodiscard]] bool is_free(std::int64_t block) const {
    const auto bit = static_cast<std::size_t>(block);
    return ((free_bits_[bit / Bitmap::kWordBits] >> (bit % Bitmap::kWordBits)) & 1U) != 0;
  }

  std::int64_t pages_;
  std::int64_t blocks_per_page_;
  std::int64_t available_ = 0;
  std::int64_t published_pages_ = 0;
  std::int64_t pinned_ = -1;
  std::uint32_t ids_digest_ = 0;
  std::vector<std::uint64_t> free_bits_;         // one bit per block
  std::vector<std::int32_t> free_counts_;        // per page, or kUnpublished
  std::vector<std::optional<Bitmap>> by_count_;  // [c]: pages with exactly c free blocks; made when first needed
  Bitmap counts_in_use_;                         // the c > 0 for which by_count_[c] is not empty
};

}  // namespace kvcached_dist
