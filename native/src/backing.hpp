// Backing: the address reservations of a rank's pools, and the physical memory behind runs of pages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "extent_table.hpp"
#include "geometry.hpp"
#include "vmm.hpp"

namespace kvcached_dist {

// What a call did. Failures are values: the protocol decides what a refusal means.
struct Outcome {
  Status status = Status::kOk;
  Call call = Call::kReserve;  // the call that was refused; meaningless if ok
  int pool = -1;               // index of the pool, -1 if none is to blame
  std::uint64_t offset = 0;    // of the extent in the pool's reservation
  std::uint64_t bytes = 0;
  int code = 0;  // the driver's or the kernel's number
  std::string detail;
  std::vector<std::int64_t> handles_created;  // per pool
  std::int64_t micros = 0;

  [[nodiscard]] bool ok() const { return status == Status::kOk; }
  // The card has no memory for this now. An injected refusal of create stands for one.
  [[nodiscard]] bool exhausted() const {
    return status == Status::kOutOfMemory || (status == Status::kInjected && call == Call::kCreate);
  }
};

// Thread-safe: one call works at a time, the totals can be read meanwhile. A run is known by its exact
// (domain, first, count) from reserve until release; a call that names a part of a run, or a page outside the
// pools, is refused before anything is touched.
class Backing {
 public:
  static constexpr std::uint64_t kExtentBytesMax = std::uint64_t{1} << 30U;

  // Reserves the addresses. Throws std::invalid_argument or std::runtime_error.
  Backing(std::shared_ptr<Device> device, std::vector<PoolGeometry> pools,
          std::uint64_t extent_bytes_max = kExtentBytesMax);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;
  Backing(Backing&&) = delete;
  Backing& operator=(Backing&&) = delete;

  using Runs = std::vector<Run>;
  // Per pool, what reserve(runs) would create. Touches nothing. Throws std::invalid_argument.
  std::vector<ExtentTable::Missing> plan(const Runs& runs);
  Outcome reserve(std::int64_t txn, const Runs& runs);
  Outcome abort(std::int64_t txn);
  Outcome map(const Runs& runs);
  Outcome unmap(const Runs& runs);
  Outcome release(const Runs& runs);
  // Unmaps, releases, frees the addresses, in this order. A pool with exported arrays keeps its (unbacked)
  // addresses until the last of them is gone, so that nobody else can get them meanwhile. Never fails.
  void close();

  [[nodiscard]] std::size_t pool_count() const { return pools_.size(); }
  [[nodiscard]] const ExtentTable& table(std::size_t pool) const { return pools_[pool]->table; }
  [[nodiscard]] const PoolGeometry& geometry(std::size_t pool) const { return pools_[pool]->geometry; }
  [[nodiscard]] Device& device() const { return *device_; }

  struct ExtentView {
    ByteRange range;
    ExtentState state = ExtentState::kEmpty;
    std::uint32_t holders = 0;
  };
  // The extents that have a handle, by offset. For tests and reports.
  std::vector<ExtentView> extents(std::size_t pool);

  // Arrays over a pool's addresses are counted; see close().
  void add_export(std::size_t pool);
  void drop_export(std::size_t pool);

 private:
  struct Pool {
    Pool(Device& device, PoolGeometry pool_geometry, std::uint64_t extent_bytes_max)
        : geometry(std::move(pool_geometry)), table(device, geometry, extent_bytes_max) {}
    PoolGeometry geometry;
    ExtentTable table;
    std::uint64_t reserved_bytes = 0;  // 0: no addresses (any more)
    int exports = 0;
  };
  // What a run has in one pool of its domain.
  struct PoolPart {
    std::size_t pool = 0;
    RunExtents extents;
  };
  struct RunRecord {
    Run run;
    std::vector<PoolPart> parts;
    std::vector<std::int64_t> txns;  // transactions in which the run took a hold
  };
  using Records = std::map<std::int64_t, RunRecord>;  // by first page
  class Operation;
  enum class OnRefusal : std::uint8_t { kStop, kGoOn };

  template <typename Step>
  bool walk(Operation& operation, RunRecord& record, OnRefusal on_refusal, const Step& step);
  [[nodiscard]] std::string refusal_of(const Runs& runs) const;
  [[nodiscard]] std::string refusal_of(const Run& run) const;
  [[nodiscard]] bool has_bytes(const Run& run) const;
  RunRecord* find(const Run& run);
  RunRecord& attach(const Run& run);
  std::vector<RunRecord*> attach_all(const Runs& runs, std::int64_t txn);
  void detach_if_idle(const Run& run);
  void release_orphans(Operation& operation, const Run& run);
  Outcome fill(Operation& operation, const std::vector<StridedFill>& fills, const std::vector<std::size_t>& pools);
  void reserve_addresses();
  void free_addresses(Pool& pool);
  void give_back_everything();

  std::shared_ptr<Device> device_;
  std::vector<std::unique_ptr<Pool>> pools_;  // by pointer: tables refer to their geometry
  std::map<int, std::vector<std::size_t>> pools_of_domain_;

  std::mutex mutex_;
  std::map<int, Records> runs_;  // by domain
  bool closed_ = false;
};

}  // namespace kvcached_dist
