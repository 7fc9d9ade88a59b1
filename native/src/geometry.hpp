// PoolGeometry: where the bytes of a pool lie in its reservation. Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vmm.hpp"

namespace kvcached_dist {

// Consecutive pages of one domain that are granted together; the unit of reclaim.
struct Run {
  int domain = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;

  [[nodiscard]] std::int64_t end() const { return first + count; }
  friend bool operator==(const Run&, const Run&) = default;
};

std::string to_string(const Run& run);

struct ByteRange {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  [[nodiscard]] std::uint64_t end() const { return offset + bytes; }
  friend auto operator<=>(const ByteRange&, const ByteRange&) = default;
};

// One per layer (and buffer, and bank): page p of the pool lies at [base + p * page_bytes, + page_bytes).
struct Lane {
  std::uint64_t base = 0;
  std::uint64_t page_bytes = 0;
};

// A piece of the fill row: `pattern` is repeated over the bytes [offset, offset + bytes) of every row.
struct FillPiece {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint32_t pattern = 0;
};

struct PoolGeometry {
  std::string name;
  int domain = 0;
  std::int64_t pages = 0;
  std::uint64_t reservation_bytes = 0;
  std::vector<Lane> lanes;
  std::vector<ByteRange> pinned;  // always backed; belong to whichever run contains page 0
  std::vector<FillPiece> fill;    // empty: fresh memory is left as it is
  std::uint64_t fill_row_bytes = 0;

  // Throws std::invalid_argument naming the pool and the number that does not fit.
  void validate() const;
  // The byte ranges of a run: one per lane, then the pinned ones if it contains page 0.
  [[nodiscard]] std::vector<ByteRange> ranges_of(const Run& run) const;
  // Appends the fills that give the run its pattern. Never a byte outside ranges_of(run).
  void append_fills(const Run& run, Address base, std::vector<StridedFill>& fills) const;

 private:
  void append_rows(Address start, std::uint64_t unit_bytes, std::uint64_t units, std::vector<StridedFill>& fills) const;
  void validate_fill() const;
  void validate_ranges() const;
};

}  // namespace kvcached_dist
