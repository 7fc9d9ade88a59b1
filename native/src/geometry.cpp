#include "geometry.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace kvcached_dist {
namespace {

constexpr std::uint64_t kWordBytes = sizeof(std::uint32_t);
// cuMemsetD2D* takes a pitch of at most 2^31 - 1 bytes (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
constexpr std::uint64_t kRowBytesMax = std::numeric_limits<std::int32_t>::max();
constexpr std::uint64_t kReservationBytesMax = std::uint64_t{1} << 47U;

[[noreturn]] void refuse(const PoolGeometry& pool, const std::string& what) {
  throw std::invalid_argument("pool '" + pool.name + "': " + what);
}

std::string text(std::uint64_t value) { return std::to_string(value); }

std::string name_of(const ByteRange& range) {
  return "[" + text(range.offset).append(", +").append(text(range.bytes)) + ")";
}

}  // namespace

std::string to_string(const Run& run) {
  return std::to_string(run.domain) + ":[" + std::to_string(run.first) + "," + std::to_string(run.end()) + ")";
}

void PoolGeometry::validate() const {
  if (domain < 0) refuse(*this, "domain=" + std::to_string(domain) + " is negative");
  if (pages < 1) refuse(*this, "pages=" + std::to_string(pages) + "; a pool has at least one page");
  if (reservation_bytes > kReservationBytesMax) refuse(*this, "reservation_bytes is above 2^47");
  validate_ranges();
  validate_fill();
}

void PoolGeometry::validate_ranges() const {
  std::vector<ByteRange> ranges = pinned;
  const auto page_count = static_cast<std::uint64_t>(pages);
  for (const Lane& lane : lanes) {
    if (lane.page_bytes == 0) refuse(*this, "a lane has 0 bytes per page; leave lanes without bytes out");
    if (lane.page_bytes > kReservationBytesMax / page_count) refuse(*this, "a lane is longer than 2^47 bytes");
    ranges.push_back({.offset = lane.base, .bytes = lane.page_bytes * page_count});
  }
  std::ranges::sort(ranges);
  std::uint64_t previous_end = 0;
  for (const ByteRange& range : ranges) {
    const std::string where = name_of(range);
    if (range.bytes == 0) refuse(*this, "pinned range " + where + " is empty");
    if (range.offset > reservation_bytes || range.bytes > reservation_bytes - range.offset) {
      refuse(*this, where + " lies outside the reservation of " + text(reservation_bytes) + " bytes");
    }
    if (range.offset < previous_end) refuse(*this, where + " overlaps the lane or pinned range before it");
    previous_end = range.end();
  }
}

void PoolGeometry::validate_fill() const {
  if (fill.empty()) return;
  if (fill_row_bytes == 0 || fill_row_bytes > kRowBytesMax) {
    refuse(*this, "fill_row_bytes=" + text(fill_row_bytes) + "; a fill needs a row of 1 to 2^31-1 bytes");
  }
  const bool plain = std::ranges::all_of(fill, [](const FillPiece& piece) { return is_uniform(piece.pattern); });
  std::vector<std::uint64_t> aligned = {fill_row_bytes};
  for (const FillPiece& piece : fill) {
    if (piece.bytes == 0 || piece.offset > fill_row_bytes || piece.bytes > fill_row_bytes - piece.offset) {
      refuse(*this, "fill piece " + name_of({.offset = piece.offset, .bytes = piece.bytes}) + " is not in the row of " +
                        text(fill_row_bytes) + " bytes");
    }
    aligned.insert(aligned.end(), {piece.offset, piece.bytes});
  }
  if (plain) return;
  for (const Lane& lane : lanes) aligned.insert(aligned.end(), {lane.base, lane.page_bytes});
  for (const ByteRange& range : pinned) aligned.insert(aligned.end(), {range.offset, range.bytes});
  for (const std::uint64_t value : aligned) {
    if (value % kWordBytes != 0) {
      refuse(*this, text(value) + " is not a multiple of 4, which a fill pattern of different bytes needs everywhere");
    }
  }
}

std::vector<ByteRange> PoolGeometry::ranges_of(const Run& run) const {
  std::vector<ByteRange> ranges;
  ranges.reserve(lanes.size() + pinned.size());
  const auto first = static_cast<std::uint64_t>(run.first);
  const auto count = static_cast<std::uint64_t>(run.count);
  for (const Lane& lane : lanes) {
    ranges.push_back({.offset = lane.base + first * lane.page_bytes, .bytes = count * lane.page_bytes});
  }
  if (run.first == 0) ranges.insert(ranges.end(), pinned.begin(), pinned.end());
  return ranges;
}

void PoolGeometry::append_fills(const Run& run, Address base, std::vector<StridedFill>& fills) const {
  if (fill.empty()) return;
  const auto first = static_cast<std::uint64_t>(run.first);
  const auto count = static_cast<std::uint64_t>(run.count);
  for (const Lane& lane : lanes) append_rows(base + lane.base + first * lane.page_bytes, lane.page_bytes, count, fills);
  if (run.first != 0) return;
  for (const ByteRange& range : pinned) append_rows(base + range.offset, range.bytes, 1, fills);
}

// `units` stretches of `unit_bytes`, one after the other; the row starts anew in each of them.
void PoolGeometry::append_rows(Address start, std::uint64_t unit_bytes, std::uint64_t units,
                               std::vector<StridedFill>& fills) const {
  if (unit_bytes % fill_row_bytes == 0) {  // rows run on across units: one fill per piece for all of them
    unit_bytes *= units;
    units = 1;
  }
  const std::uint64_t rows = unit_bytes / fill_row_bytes;
  const std::uint64_t rest_bytes = unit_bytes % fill_row_bytes;
  for (std::uint64_t unit = 0; unit < units; ++unit, start += unit_bytes) {
    for (const FillPiece& piece : fill) {
      if (piece.bytes == fill_row_bytes) {
        fills.push_back({.start = start, .row_bytes = unit_bytes, .bytes = unit_bytes, .pattern = piece.pattern});
        continue;
      }
      if (rows > 0) {
        fills.push_back({.start = start + piece.offset,
                         .rows = rows,
                         .row_bytes = fill_row_bytes,
                         .bytes = piece.bytes,
                         .pattern = piece.pattern});
      }
      if (piece.offset < rest_bytes) {
        const std::uint64_t bytes = std::min(piece.bytes, rest_bytes - piece.offset);
        fills.push_back({.start = start + rows * fill_row_bytes + piece.offset,
                         .row_bytes = bytes,
                         .bytes = bytes,
                         .pattern = piece.pattern});
      }
    }
  }
}

}  // namespace kvcached_dist
