// ExtentTable: which physical handles a pool has, where they are mapped, and which runs use them.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "geometry.hpp"
#include "vmm.hpp"

namespace kvcached_dist {

enum class ExtentState : std::uint8_t {
  kEmpty,       // no handle
  kHeld,        // handle, not mapped
  kMapped,      // mapped, but access was refused so far: touching it faults
  kAccessible,  // mapped, readable and writable
};

// One handle at one address range: a whole allocation at offset 0, mapped and unmapped whole.
// Invariants: mappers <= holders; a handle exists iff state != kEmpty; it is mapped iff mappers > 0.
struct Extent {
  ByteRange range;
  Handle handle = 0;
  ExtentState state = ExtentState::kEmpty;
  std::uint32_t holders = 0;  // runs that need the handle
  std::uint32_t mappers = 0;  // runs that need the mapping
  std::uint32_t users = 0;    // runs that name this extent, whether they hold it or not
};

// What one run has of one extent.
struct Share {
  Extent* extent = nullptr;
  bool holds = false;
  bool maps = false;
  std::int64_t txn = 0;  // transaction in which the run took its hold
};

// A run's extents in one pool. Interior extents live here; border extents live in the table.
class RunExtents {
 public:
  explicit RunExtents(std::vector<Extent> interior) : interior_(std::move(interior)) {}
  ~RunExtents() = default;
  RunExtents(RunExtents&&) = default;
  RunExtents& operator=(RunExtents&&) = default;
  RunExtents(const RunExtents&) = delete;
  RunExtents& operator=(const RunExtents&) = delete;

  std::vector<Share>& shares() { return shares_; }
  [[nodiscard]] const std::vector<Share>& shares() const { return shares_; }

 private:
  friend class ExtentTable;
  std::vector<Extent> interior_;  // never resized: shares_ points into it
  std::vector<std::uint64_t> borders_;
  std::vector<Share> shares_;
};

// The extents of one pool. A granule wholly inside one byte range of one run is interior, and the interior of a
// range is one extent (cut only above `extent_bytes_max`). Every other granule that a run touches is a border
// granule, an extent of its own, counted by the runs that use it. Not thread-safe, except for the totals.
class ExtentTable {
 public:
  ExtentTable(Device& device, const PoolGeometry& geometry, std::uint64_t extent_bytes_max)
      : device_(device), geometry_(geometry), extent_bytes_max_(extent_bytes_max) {}

  void set_base(Address base) { base_ = base; }
  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] const PoolGeometry& geometry() const { return geometry_; }

  RunExtents attach(const Run& run);
  // The run gives its extents up; it must hold none.
  void detach(RunExtents& extents);

  struct Missing {
    std::int64_t handles = 0;
    std::uint64_t bytes = 0;
  };
  // What holding `runs` would have to create now. `attached[i]` are the extents of runs[i] if it has some.
  [[nodiscard]] Missing missing(const std::vector<Run>& runs, const std::vector<const RunExtents*>& attached) const;

  // The steps of one share. Idempotent; a refused step has changed nothing, except that release_share lets go of
  // the share in any case and keeps a handle that the driver would not take back as an orphan of `run`.
  Result hold_share(Share& share, std::int64_t txn, bool& created);
  Result map_share(Share& share);
  Result unmap_share(Share& share);
  Result release_share(Share& share, const Run& run);

  // Tries once more to release the orphans of a run. The last refusal, if any, with its range.
  Result release_orphans(const Run& run, ByteRange& refused);
  void release_all_orphans();

  // Totals; any thread may read them. Orphans are in them: they still take memory.
  [[nodiscard]] std::int64_t handles() const { return handles_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t mapped_bytes() const { return mapped_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Orphan {
    Run run;
    Handle handle = 0;
    ByteRange range;
  };

  Result release_handle(Handle handle, std::uint64_t bytes);
  void split(const Run& run, std::vector<ByteRange>& interior, std::vector<std::uint64_t>& borders) const;

  Device& device_;
  const PoolGeometry& geometry_;
  std::uint64_t extent_bytes_max_;
  Address base_ = 0;
  std::unordered_map<std::uint64_t, Extent> borders_;  // by granule index
  std::vector<Orphan> orphans_;
  std::atomic<std::int64_t> handles_{0};
  std::atomic<std::uint64_t> held_bytes_{0};
  std::atomic<std::uint64_t> mapped_bytes_{0};
};

}  // namespace kvcached_dist
