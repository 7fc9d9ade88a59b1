#include "block_pool.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <stdexcept>

namespace kvcached_dist {
namespace {

constexpr auto kWordBits = static_cast<std::int64_t>(Bitmap::kWordBits);  // signed, as ids are
constexpr std::int64_t kBlocksMax = 1LL << 36;                            // NOLINT(bugprone-signed-bitwise)

std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }

// Bits [first, first + count) of a word; first is below the width of a word.
std::uint64_t mask_of(std::size_t first, std::size_t count) {
  if (count == 0) return 0;
  return (~std::uint64_t{0} >> (Bitmap::kWordBits - std::min(count, Bitmap::kWordBits))) << first;
}

std::int64_t checked_blocks(std::int64_t pages, std::int64_t blocks_per_page) {
  if (pages < 1 || blocks_per_page < 1) {
    throw std::invalid_argument("a block pool needs pages >= 1 and blocks_per_page >= 1, got " + std::to_string(pages) +
                                " and " + std::to_string(blocks_per_page));
  }
  if (blocks_per_page > std::numeric_limits<std::int32_t>::max() || pages > kBlocksMax / blocks_per_page) {
    throw std::invalid_argument("a block pool holds at most 2^36 blocks, and less than 2^31 in a page");
  }
  return pages * blocks_per_page;
}

// A polynomial of the ids in each of four lanes, which a processor works on at once, and one over the lanes.
std::uint32_t digest_of(std::span<const std::int64_t> blocks) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15U;
  constexpr std::size_t kLanes = 4;
  constexpr unsigned kHalf = 32;
  std::array<std::uint64_t, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= blocks.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = (lanes[lane] * kOdd) + static_cast<std::uint64_t>(blocks[i + lane]);
    }
  }
  std::uint64_t digest = blocks.size();
  for (; i < blocks.size(); ++i) digest = (digest * kOdd) + static_cast<std::uint64_t>(blocks[i]);
  for (const std::uint64_t lane : lanes) digest = (digest ^ (lane >> kHalf) ^ lane) * kOdd;
  return static_cast<std::uint32_t>(digest >> kHalf);
}

std::string name_of_run(std::int64_t first_page, std::int64_t count) {
  return "pages [" + std::to_string(first_page) + "," + std::to_string(first_page + count) + ")";
}

}  // namespace

BlockPool::BlockPool(std::int64_t pages, std::int64_t blocks_per_page)
    : pages_(pages),
      blocks_per_page_(blocks_per_page),
      free_bits_(index((checked_blocks(pages, blocks_per_page) + kWordBits - 1) / kWordBits)),
      free_counts_(index(pages), kUnpublished),
      by_count_(index(blocks_per_page + 1)),
      counts_in_use_(index(blocks_per_page + 1)) {}

void BlockPool::check_run(std::int64_t first_page, std::int64_t count) const {
  if (first_page >= 0 && count >= 1 && count <= pages_ && first_page <= pages_ - count) return;
  throw std::invalid_argument("run of " + std::to_string(count) + " pages from page " + std::to_string(first_page) +
                              " is not inside a pool of " + std::to_string(pages_) + " pages");
}

// Moves a page between the sets of by_count_.
void BlockPool::set_free_count(std::int64_t page, std::int32_t count) {
  std::int32_t& current = free_counts_[index(page)];
  if (current > 0) {
    Bitmap& pages = *by_count_[index(current)];
    pages.clear(index(page));
    if (pages.lowest() == Bitmap::kNone) counts_in_use_.clear(index(current));
  }
  if (count > 0) {
    std::optional<Bitmap>& pages = by_count_[index(count)];
    if (!pages.has_value()) pages.emplace(index(pages_));
    pages->set(index(page));
    counts_in_use_.set(index(count));
  }
  current = count;
}

void BlockPool::mark_page(std::int64_t page, bool free) {
  std::int64_t block = page * blocks_per_page_;
  const std::int64_t end = block + blocks_per_page_;
  while (block < end) {
    const std::int64_t bit = block % kWordBits;
    const std::int64_t length = std::min(kWordBits - bit, end - block);
    const std::uint64_t mask = mask_of(index(bit), index(length));
    std::uint64_t& word = free_bits_[index(block / kWordBits)];
    word = free ? word | mask : word & ~mask;
    block += length;
  }
}

void BlockPool::publish(std::int64_t first_page, std::int64_t count) {
  check_run(first_page, count);
  for (std::int64_t page = first_page; page < first_page + count; ++page) {
    if (free_counts_[index(page)] != kUnpublished) {
      throw std::invalid_argument("page " + std::to_string(page) + " of " + name_of_run(first_page, count) +
                                  " is published already");
    }
  }
  for (std::int64_t page = first_page; page < first_page + count; ++page) {
    mark_page(page, true);
    set_free_count(page, static_cast<std::int32_t>(blocks_per_page_));
  }
  available_ += count * blocks_per_page_;
  published_pages_ += count;
}

bool BlockPool::run_is_free(std::int64_t first_page, std::int64_t count) const {
  check_run(first_page, count);
  const auto start = free_counts_.begin() + first_page;
  return std::all_of(start, start + count, [this](std::int32_t free) { return free == blocks_per_page_; });
}

void BlockPool::retire(std::int64_t first_page, std::int64_t count) {
  check_run(first_page, count);
  for (std::int64_t page = first_page; page < first_page + count; ++page) {
    const std::int32_t free = free_counts_[index(page)];
    if (free == blocks_per_page_) continue;
    const std::string why = free == kUnpublished ? " is not published"
                                                 : " has " + std::to_string(blocks_per_page_ - free) + " blocks in use";
    throw std::invalid_argument("page " + std::to_string(page) + " of " + name_of_run(first_page, count) + why);
  }
  for (std::int64_t page = first_page; page < first_page + count; ++page) {
    mark_page(page, false);
    set_free_count(page, kUnpublished);
  }
  available_ -= count * blocks_per_page_;
  published_pages_ -= count;
}

// Takes the lowest free blocks of a page until it has none left or `end` is reached.
std::int64_t* BlockPool::take_from(std::int64_t page, std::int64_t* out, const std::int64_t* end) {
  const std::int64_t* const start = out;
  const std::int64_t page_end = (page + 1) * blocks_per_page_;
  for (std::int64_t block = page * blocks_per_page_; block < page_end && out != end;) {
    std::uint64_t& word = free_bits_[index(block / kWordBits)];
    const std::uint64_t rest = word >> index(block % kWordBits);
    if (rest == 0) {
      block += kWordBits - block % kWordBits;
      continue;
    }
    block += std::countr_zero(rest);
    if (block >= page_end) break;  // a word can reach into the next page
    word &= ~(std::uint64_t{1} << index(block % kWordBits));
    *out++ = block++;
  }
  set_free_count(page, free_counts_[index(page)] - static_cast<std::int32_t>(out - start));
  return out;
}

bool BlockPool::alloc(std::span<std::int64_t> blocks) {
  const auto wanted = static_cast<std::int64_t>(blocks.size());
  if (wanted > available_) return false;
  if (blocks_per_page_ == 1) {
    take_single(blocks);
    available_ -= wanted;
    ids_digest_ = digest_of(blocks);
    return true;
  }
  std::int64_t* out = blocks.data();
  const std::int64_t* const end = out + wanted;
  // Taking from the fullest page leaves it the fullest, so a page is emptied before the next one is looked for.
  while (out != end) {
    const Bitmap& fullest = *by_count_[counts_in_use_.lowest()];
    out = take_from(static_cast<std::int64_t>(fullest.lowest()), out, end);
  }
  available_ -= wanted;
  ids_digest_ = digest_of(blocks);
  return true;
}

// Pages of one block: the free pages are the free blocks, lowest first. Neighbours are taken together, in plain loops,
// so that a long run costs little more than its stores.
void BlockPool::take_single(std::span<std::int64_t> blocks) {
  if (blocks.empty()) return;
  Bitmap& free_pages = *by_count_[1];
  while (!blocks.empty()) {
    const std::size_t word = free_pages.lowest() / Bitmap::kWordBits;
    const std::uint64_t before = free_pages.word(word);
    std::uint64_t rest = before;
    while (rest != 0 && !blocks.empty()) {
      const auto bit = static_cast<std::size_t>(std::countr_zero(rest));
      const std::size_t count = std::min(static_cast<std::size_t>(std::countr_one(rest >> bit)), blocks.size());
      const std::size_t first = (word * Bitmap::kWordBits) + bit;
      for (std::size_t i = 0; i < count; ++i) blocks[i] = static_cast<std::int64_t>(first + i);
      std::fill_n(&free_counts_[first], count, 0);
      rest &= ~mask_of(bit, count);
      blocks = blocks.subspan(count);
    }
    free_bits_[word] = rest;
    free_pages.clear_word(word, before & ~rest);
  }
  if (free_pages.lowest() == Bitmap::kNone) counts_in_use_.clear(1);
}

// How many of these ids are in use, may be freed and are neighbours in ascending order inside one word of the bitmap;
// 0: not even the first may be freed.
std::size_t BlockPool::freeable_neighbours(std::span<const std::int64_t> blocks) const {
  const std::int64_t first = blocks[0];
  if (first < 0 || first >= pages_) return 0;
  std::size_t most =
      std::min({blocks.size(), Bitmap::kWordBits - (index(first) % Bitmap::kWordBits), index(pages_ - first)});
  if (pinned_ >= first) most = std::min(most, index(pinned_ - first));
  std::size_t count = 0;
  while (count < most && blocks[count] == first + static_cast<std::int64_t>(count)) ++count;
  const std::span counts = std::span(free_counts_).subspan(index(first), count);
  return static_cast<std::size_t>(std::ranges::find_if(counts, [](auto free) { return free != 0; }) - counts.begin());
}

void BlockPool::free_single(std::span<const std::int64_t> blocks) {
  for (std::size_t i = 0; i < blocks.size();) {
    const std::size_t count = freeable_neighbours(blocks.subspan(i));
    if (count == 0) {
      const std::string complaint = complaint_about(blocks[i]);
      for (const std::int64_t undo : blocks.first(i)) mark_single(index(undo), 1, false);
      throw std::invalid_argument(complaint + "; nothing was freed");
    }
    mark_single(index(blocks[i]), count, true);
    i += count;
  }
}

// Neighbours inside one word of the bitmap are free from now on, or in use.
void BlockPool::mark_single(std::size_t first, std::size_t count, bool free) {
  const std::size_t word = first / Bitmap::kWordBits;
  const std::uint64_t mask = mask_of(first % Bitmap::kWordBits, count);
  Bitmap& free_pages = *by_count_[1];
  std::fill_n(&free_counts_[first], count, free ? 1 : 0);
  if (free) {
    free_bits_[word] |= mask;
    free_pages.set_word(word, mask);
    counts_in_use_.set(1);
  } else {
    free_bits_[word] &= ~mask;
    free_pages.clear_word(word, mask);
    if (free_pages.lowest() == Bitmap::kNone) counts_in_use_.clear(1);
  }
}

void BlockPool::pin(std::int64_t block) {
  if (!is_in_use(block)) throw std::invalid_argument(complaint_about(block) + ": only a block in use can be pinned");
  pinned_ = block;
}

bool BlockPool::is_in_use(std::int64_t block) const {
  return block >= 0 && block < pages_ * blocks_per_page_ &&
         free_counts_[index(block / blocks_per_page_)] != kUnpublished && !is_free(block);
}

std::string BlockPool::complaint_about(std::int64_t block) const {
  const std::string name = "block " + std::to_string(block);
  if (block < 0 || block >= pages_ * blocks_per_page_) {
    return name + " is not in [0," + std::to_string(pages_ * blocks_per_page_) + ")";
  }
  if (block == pinned_) return name + " is pinned (the null block) and is never freed";
  if (free_counts_[index(block / blocks_per_page_)] == kUnpublished) {
    return name + " is in page " + std::to_string(block / blocks_per_page_) + ", which is not published";
  }
  return name + " is free already, or named twice in this call";
}

void BlockPool::free(std::span<const std::int64_t> blocks) {
  if (blocks_per_page_ == 1) {
    free_single(blocks);
    available_ += static_cast<std::int64_t>(blocks.size());
    ids_digest_ = digest_of(blocks);
    return;
  }
  // First all bits, which finds repeated ids too, so that a bad id can still undo them; then the counts.
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (!is_in_use(blocks[i]) || blocks[i] == pinned_) {
      const std::string complaint = complaint_about(blocks[i]);
      for (const std::int64_t undo : blocks.first(i)) {
        free_bits_[index(undo / kWordBits)] &= ~(std::uint64_t{1} << index(undo % kWordBits));
      }
      throw std::invalid_argument(complaint + "; nothing was freed");
    }
    free_bits_[index(blocks[i] / kWordBits)] |= std::uint64_t{1} << index(blocks[i] % kWordBits);
  }
  for (std::size_t i = 0; i < blocks.size();) {
    const std::int64_t page = blocks[i] / blocks_per_page_;
    std::size_t next = i + 1;
    while (next < blocks.size() && blocks[next] / blocks_per_page_ == page) ++next;
    set_free_count(page, free_counts_[index(page)] + static_cast<std::int32_t>(next - i));
    i = next;
  }
  available_ += static_cast<std::int64_t>(blocks.size());
  ids_digest_ = digest_of(blocks);
}

void BlockPool::reset() {
  for (std::int64_t page = 0; page < pages_; ++page) {
    if (free_counts_[index(page)] == kUnpublished) continue;
    mark_page(page, true);
    set_free_count(page, static_cast<std::int32_t>(blocks_per_page_));
  }
  available_ = published_pages_ * blocks_per_page_;
}

}  // namespace kvcached_dist
