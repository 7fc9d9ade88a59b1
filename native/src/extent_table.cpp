#include "extent_table.hpp"

#include <algorithm>
#include <unordered_set>

namespace kvcached_dist {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

// Cuts the run's byte ranges at granules. Two lanes of one run may end in the same granule: it is named once.
void ExtentTable::split(const Run& run, std::vector<ByteRange>& interior, std::vector<std::uint64_t>& borders) const {
  const std::uint64_t granule = device_.granule_bytes();
  const std::uint64_t piece_max = std::max(extent_bytes_max_ / granule, std::uint64_t{1}) * granule;
  for (const ByteRange& range : geometry_.ranges_of(run)) {
    const std::uint64_t inner_start = (range.offset + granule - 1) / granule * granule;
    const std::uint64_t inner_end = range.end() / granule * granule;
    for (std::uint64_t at = inner_start; at < inner_end;) {
      const std::uint64_t bytes = std::min(piece_max, inner_end - at);
      interior.push_back({.offset = at, .bytes = bytes});
      at += bytes;
    }
    if (range.offset != inner_start) borders.push_back(range.offset / granule);
    if (range.end() != inner_end) borders.push_back(range.end() / granule);
  }
  std::ranges::sort(borders);
  const auto repeated = std::ranges::unique(borders);
  borders.erase(repeated.begin(), repeated.end());
}

RunExtents ExtentTable::attach(const Run& run) {
  std::vector<ByteRange> interior;
  std::vector<std::uint64_t> borders;
  split(run, interior, borders);
  std::vector<Extent> extents;
  extents.reserve(interior.size());
  for (const ByteRange& range : interior) extents.push_back({.range = range, .users = 1});
  RunExtents attached(std::move(extents));
  attached.shares_.reserve(interior.size() + borders.size());
  for (Extent& extent : attached.interior_) attached.shares_.push_back({.extent = &extent});
  const std::uint64_t granule = device_.granule_bytes();
  for (const std::uint64_t index : borders) {
    Extent& border = borders_[index];
    border.range = {.offset = index * granule, .bytes = granule};
    ++border.users;
    attached.shares_.push_back({.extent = &border});
  }
  attached.borders_ = std::move(borders);
  return attached;
}

void ExtentTable::detach(RunExtents& extents) {
  for (const std::uint64_t index : extents.borders_) {
    const auto found = borders_.find(index);
    if (--found->second.users == 0) borders_.erase(found);
  }
  extents.borders_.clear();
  extents.shares_.clear();
}

ExtentTable::Missing ExtentTable::missing(const std::vector<Run>& runs,
                                          const std::vector<const RunExtents*>& attached) const {
  Missing sum;
  std::unordered_set<std::uint64_t> counted;  // neighbouring runs of this very question share borders
  const std::uint64_t granule = device_.granule_bytes();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::vector<ByteRange> interior;
    std::vector<std::uint64_t> borders;
    if (attached[i] == nullptr) {
      split(runs[i], interior, borders);
    } else {
      borders = attached[i]->borders_;
      for (const Extent& extent : attached[i]->interior_) {
        if (extent.state == ExtentState::kEmpty) interior.push_back(extent.range);
      }
    }
    for (const std::uint64_t index : borders) {
      const auto found = borders_.find(index);
      const bool exists = found != borders_.end() && found->second.state != ExtentState::kEmpty;
      if (!exists && counted.insert(index).second) interior.push_back({.offset = index * granule, .bytes = granule});
    }
    for (const ByteRange& range : interior) {
      ++sum.handles;
      sum.bytes += range.bytes;
    }
  }
  return sum;
}

Result ExtentTable::hold_share(Share& share, std::int64_t txn, bool& created) {
  created = false;
  if (share.holds) return {};
  Extent& extent = *share.extent;
  if (extent.state == ExtentState::kEmpty) {
    const Result result = device_.create(extent.range.bytes, extent.handle);
    if (!result.ok()) return result;
    extent.state = ExtentState::kHeld;
    handles_.fetch_add(1, kRelaxed);
    held_bytes_.fetch_add(extent.range.bytes, kRelaxed);
    created = true;
  }
  ++extent.holders;
  share.holds = true;
  share.txn = txn;
  return {};
}

Result ExtentTable::map_share(Share& share) {
  Extent& extent = *share.extent;
  const Address address = base_ + extent.range.offset;
  if (extent.state == ExtentState::kHeld) {
    const Result result = device_.map(address, extent.range.bytes, extent.handle);
    if (!result.ok()) return result;
    extent.state = ExtentState::kMapped;
    mapped_bytes_.fetch_add(extent.range.bytes, kRelaxed);
  }
  // Counted before access is granted: if that is refused, unmap_share has to find the mapping.
  if (!share.maps) {
    share.maps = true;
    ++extent.mappers;
  }
  if (extent.state == ExtentState::kMapped) {
    const Result result = device_.access(address, extent.range.bytes);
    if (!result.ok()) return result;
    extent.state = ExtentState::kAccessible;
  }
  return {};
}

Result ExtentTable::unmap_share(Share& share) {
  if (!share.maps) return {};
  Extent& extent = *share.extent;
  if (extent.mappers == 1) {
    const Result result = device_.unmap(base_ + extent.range.offset, extent.range.bytes);
    if (!result.ok()) return result;
    extent.state = ExtentState::kHeld;
    mapped_bytes_.fetch_sub(extent.range.bytes, kRelaxed);
  }
  --extent.mappers;
  share.maps = false;
  return {};
}

Result ExtentTable::release_share(Share& share, const Run& run) {
  if (!share.holds) return {};
  Extent& extent = *share.extent;
  share.holds = false;
  if (--extent.holders > 0) return {};
  const Result result = release_handle(extent.handle, extent.range.bytes);
  if (!result.ok()) orphans_.push_back({.run = run, .handle = extent.handle, .range = extent.range});
  extent.state = ExtentState::kEmpty;
  extent.handle = 0;
  return result;
}

Result ExtentTable::release_handle(Handle handle, std::uint64_t bytes) {
  const Result result = device_.release(handle, bytes);
  if (result.ok()) {
    handles_.fetch_sub(1, kRelaxed);
    held_bytes_.fetch_sub(bytes, kRelaxed);
  }
  return result;
}

Result ExtentTable::release_orphans(const Run& run, ByteRange& refused) {
  Result last;
  std::erase_if(orphans_, [&](const Orphan& orphan) {
    if (!(orphan.run == run)) return false;
    const Result result = release_handle(orphan.handle, orphan.range.bytes);
    if (result.ok()) return true;
    last = result;
    refused = orphan.range;
    return false;
  });
  return last;
}

void ExtentTable::release_all_orphans() {
  std::erase_if(orphans_, [&](const Orphan& orphan) { return release_handle(orphan.handle, orphan.range.bytes).ok(); });
}

}  // namespace kvcached_dist
