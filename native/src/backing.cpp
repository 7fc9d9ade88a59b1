#include "backing.hpp"

#include <algorithm>
#include <chrono>
#include <ranges>
#include <stdexcept>
#include <utility>

namespace kvcached_dist {
namespace {

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t granule) { return (bytes + granule - 1) / granule * granule; }

}  // namespace

// One call under way: it holds the lock, takes the time and writes the outcome.
class Backing::Operation {
 public:
  explicit Operation(Backing& backing)
      : backing_(backing), lock_(backing.mutex_), start_(std::chrono::steady_clock::now()) {
    outcome_.handles_created.resize(backing.pools_.size());
  }

  // The reason why nothing can be done for these runs; empty if there is none.
  [[nodiscard]] std::string refusal(const Runs& runs) const {
    if (backing_.closed_) return "the backing is closed";
    if (!backing_.device_->in_owner_process()) return "the backing belongs to the process that forked this one";
    return backing_.refusal_of(runs);
  }

  void created(std::size_t pool) { ++outcome_.handles_created[pool]; }

  // Notes a failure. The first one is the cause; later ones are what it led to.
  void fail(const Result& result, std::size_t pool, const ByteRange& range) {
    if (!outcome_.ok()) return;
    outcome_.status = result.status;
    outcome_.call = result.call;
    outcome_.code = result.code;
    outcome_.pool = static_cast<int>(pool);
    outcome_.offset = range.offset;
    outcome_.bytes = range.bytes;
    const std::string cause =
        result.status == Status::kInjected ? "injected fault" : backing_.device_->explain(result.code);
    outcome_.detail = "pool '" + backing_.pools_[pool]->geometry.name + "': " + std::string(name_of(result.call)) +
                      " of " + std::to_string(range.bytes) + " bytes at offset " + std::to_string(range.offset) + ": " +
                      cause;
  }

  void add_detail(const std::string& text) { outcome_.detail += text; }

  Outcome refused(Call call, std::string why) {
    outcome_.status = Status::kInvalidArgument;
    outcome_.call = call;
    outcome_.detail = std::move(why);
    return finish();
  }

  Outcome finish() {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    outcome_.micros = std::chrono::duration_cast<std::chrono::microseconds>(elapsed).count();
    return std::move(outcome_);
  }

 private:
  Backing& backing_;
  std::unique_lock<std::mutex> lock_;
  std::chrono::steady_clock::time_point start_;
  Outcome outcome_;
};

Backing::Backing(std::shared_ptr<Device> device, std::vector<PoolGeometry> pools, std::uint64_t extent_bytes_max)
    : device_(std::move(device)) {
  if (extent_bytes_max < device_->granule_bytes()) {
    throw std::invalid_argument("extent_bytes_max=" + std::to_string(extent_bytes_max) + " is less than a granule of " +
                                std::to_string(device_->granule_bytes()) + " bytes");
  }
  for (PoolGeometry& geometry : pools) {
    geometry.validate();
    std::vector<std::size_t>& siblings = pools_of_domain_[geometry.domain];
    if (!siblings.empty() && pools_[siblings.front()]->geometry.pages != geometry.pages) {
      throw std::invalid_argument("pool '" + geometry.name + "': pages=" + std::to_string(geometry.pages) + ", but '" +
                                  pools_[siblings.front()]->geometry.name + "' of the same domain has " +
                                  std::to_string(pools_[siblings.front()]->geometry.pages));
    }
    siblings.push_back(pools_.size());
    pools_.push_back(std::make_unique<Pool>(*device_, std::move(geometry), extent_bytes_max));
  }
  reserve_addresses();
}

Backing::~Backing() {
  close();
  // No array is left: each of them keeps the backing alive.
  if (!device_->in_owner_process()) return;
  for (const auto& pool : pools_) free_addresses(*pool);
}

void Backing::reserve_addresses() {
  for (const auto& pool : pools_) {
    const std::uint64_t bytes = round_up(pool->geometry.reservation_bytes, device_->granule_bytes());
    if (bytes == 0) continue;  // a stage without layers of this family
    Address base = 0;
    const Result result = device_->reserve(bytes, base);
    if (!result.ok()) {
      for (const auto& earlier : pools_) free_addresses(*earlier);
      const std::string cause = result.status == Status::kInjected ? "injected fault" : device_->explain(result.code);
      throw std::runtime_error("pool '" + pool->geometry.name + "': cannot reserve " + std::to_string(bytes) +
                               " bytes of address space: " + cause);
    }
    pool->table.set_base(base);
    pool->reserved_bytes = bytes;
  }
}

void Backing::free_addresses(Pool& pool) {
  // Addresses must not be freed under a mapping that could not be removed.
  if (pool.reserved_bytes == 0 || pool.exports > 0 || pool.table.mapped_bytes() > 0) return;
  if (device_->free_address(pool.table.base(), pool.reserved_bytes).ok()) pool.reserved_bytes = 0;
}

std::string Backing::refusal_of(const Run& run) const {
  if (run.domain < 0 || run.first < 0 || run.count < 1) return "needs domain >= 0, first >= 0 and count >= 1";
  const auto domain = pools_of_domain_.find(run.domain);
  if (domain != pools_of_domain_.end()) {
    const std::int64_t pages = pools_[domain->second.front()]->geometry.pages;
    if (run.count > pages || run.first > pages - run.count) {
      return "is outside the domain of " + std::to_string(pages) + " pages";
    }
  }
  const auto records = runs_.find(run.domain);
  if (records == runs_.end()) return {};
  const auto overlaps = [&](const Run& other) {
    return !(other == run) && other.first < run.end() && run.first < other.end();
  };
  const auto after = records->second.upper_bound(run.first);
  if (after != records->second.end() && overlaps(after->second.run)) return "overlaps " + to_string(after->second.run);
  if (after != records->second.begin() && overlaps(std::prev(after)->second.run)) {
    return "overlaps " + to_string(std::prev(after)->second.run);
  }
  return {};
}

std::string Backing::refusal_of(const Runs& runs) const {
  for (const Run& run : runs) {
    const std::string why = refusal_of(run);
    if (!why.empty()) return "run " + to_string(run) + " " + why;
  }
  Runs sorted = runs;
  std::ranges::sort(sorted, {}, [](const Run& run) { return std::pair(run.domain, run.first); });
  const auto clash = std::ranges::adjacent_find(
      sorted, [](const Run& a, const Run& b) { return a.domain == b.domain && b.first < a.end(); });
  if (clash == sorted.end()) return {};
  return "runs " + to_string(*clash) + " and " + to_string(*std::next(clash)) + " of one call overlap";
}

Backing::RunRecord* Backing::find(const Run& run) {
  const auto records = runs_.find(run.domain);
  if (records == runs_.end()) return nullptr;
  const auto found = records->second.find(run.first);
  return found == records->second.end() ? nullptr : &found->second;
}

Backing::RunRecord& Backing::attach(const Run& run) {
  RunRecord record{.run = run, .parts = {}, .txns = {}};
  const auto pools = pools_of_domain_.find(run.domain);
  if (pools != pools_of_domain_.end()) {
    for (const std::size_t pool : pools->second)
      record.parts.push_back({.pool = pool, .extents = pools_[pool]->table.attach(run)});
  }
  return runs_[run.domain].emplace(run.first, std::move(record)).first->second;
}

// A stage without layers of a family has nothing to reserve for its runs, and agrees to everything.
bool Backing::has_bytes(const Run& run) const {
  const auto pools = pools_of_domain_.find(run.domain);
  return pools != pools_of_domain_.end() && std::ranges::any_of(pools->second, [&](std::size_t pool) {
           return !pools_[pool]->geometry.ranges_of(run).empty();
         });
}

void Backing::detach_if_idle(const Run& run) {
  RunRecord* record = find(run);
  if (record == nullptr) return;
  for (const PoolPart& part : record->parts) {
    if (std::ranges::any_of(part.extents.shares(), &Share::holds)) return;
  }
  for (PoolPart& part : record->parts) pools_[part.pool]->table.detach(part.extents);
  runs_[run.domain].erase(run.first);
}

std::vector<ExtentTable::Missing> Backing::plan(const Runs& runs) {
  const std::scoped_lock lock(mutex_);
  const std::string refusal = refusal_of(runs);
  if (!refusal.empty()) throw std::invalid_argument(refusal);
  std::vector<ExtentTable::Missing> missing(pools_.size());
  for (const auto& [domain, pools] : pools_of_domain_) {
    Runs own;
    std::vector<const RunRecord*> records;
    for (const Run& run : runs) {
      if (run.domain != domain) continue;
      own.push_back(run);
      records.push_back(find(run));
    }
    for (std::size_t i = 0; i < pools.size(); ++i) {
      std::vector<const RunExtents*> attached(records.size(), nullptr);
      for (std::size_t r = 0; r < records.size(); ++r) {
        if (records[r] != nullptr) attached[r] = &records[r]->parts[i].extents;
      }
      missing[pools[i]] = pools_[pools[i]]->table.missing(own, attached);
    }
  }
  return missing;
}

// Applies `step` to the shares of a run, pool by pool. The operation notes refusals; `kStop` ends at the first.
template <typename Step>
bool Backing::walk(Operation& operation, RunRecord& record, OnRefusal on_refusal, const Step& step) {
  bool complete = true;
  for (PoolPart& part : record.parts) {
    for (Share& share : part.extents.shares()) {
      const ByteRange range = share.extent->range;
      const Result result = step(part.pool, share);
      if (result.ok()) continue;
      operation.fail(result, part.pool, range);
      complete = false;
      if (on_refusal == OnRefusal::kStop) return false;
    }
  }
  return complete;
}

std::vector<Backing::RunRecord*> Backing::attach_all(const Runs& runs, std::int64_t txn) {
  std::vector<RunRecord*> records;
  records.reserve(runs.size());
  for (const Run& run : runs) {
    RunRecord* record = find(run);
    if (record == nullptr) record = &attach(run);
    if (std::ranges::find(record->txns, txn) == record->txns.end()) record->txns.push_back(txn);
    records.push_back(record);
  }
  return records;
}

Outcome Backing::reserve(std::int64_t txn, const Runs& runs) {
  Operation operation(*this);
  if (std::string why = operation.refusal(runs); !why.empty()) return operation.refused(Call::kCreate, std::move(why));
  struct Taken {
    const Run* run;
    std::size_t pool;
    Share* share;
  };
  const std::vector<RunRecord*> records = attach_all(runs, txn);
  std::size_t shares = 0;
  for (const RunRecord* record : records) {
    for (const PoolPart& part : record->parts) shares += part.extents.shares().size();
  }
  // Everything that could need memory of our own is done: from here on only the driver can refuse.
  std::vector<Taken> taken;
  taken.reserve(shares);
  const auto hold_all = [&](RunRecord* record) {
    return walk(operation, *record, OnRefusal::kStop, [&](std::size_t pool, Share& share) {
      if (share.holds) return Result{};
      bool created = false;
      const Result result = pools_[pool]->table.hold_share(share, txn, created);
      if (result.ok()) taken.push_back({.run = &record->run, .pool = pool, .share = &share});
      if (created) operation.created(pool);
      return result;
    });
  };
  if (std::ranges::all_of(records, hold_all)) return operation.finish();

  std::size_t stuck = 0;
  for (const Taken& last : std::views::reverse(taken)) {
    if (!pools_[last.pool]->table.release_share(*last.share, *last.run).ok()) ++stuck;
  }
  if (stuck > 0) operation.add_detail("; " + std::to_string(stuck) + " created handles could not be released");
  for (const Run& run : runs) detach_if_idle(run);
  return operation.finish();
}

Outcome Backing::abort(std::int64_t txn) {
  Operation operation(*this);
  if (std::string why = operation.refusal({}); !why.empty()) return operation.refused(Call::kRelease, std::move(why));
  std::vector<RunRecord*> touched;
  for (Records& records : std::views::values(runs_)) {
    for (RunRecord& record : std::views::values(records)) {
      if (std::erase(record.txns, txn) > 0) touched.push_back(&record);
    }
  }
  for (RunRecord* record : touched) {
    walk(operation, *record, OnRefusal::kGoOn, [&](std::size_t pool, Share& share) {
      if (share.txn != txn || share.maps) return Result{};
      return pools_[pool]->table.release_share(share, record->run);
    });
    detach_if_idle(Run(record->run));
  }
  return operation.finish();
}

Outcome Backing::map(const Runs& runs) {
  Operation operation(*this);
  if (std::string why = operation.refusal(runs); !why.empty()) return operation.refused(Call::kMap, std::move(why));
  std::vector<StridedFill> fills;
  std::vector<std::size_t> fill_pools;  // the pool of each fill
  for (const Run& run : runs) {
    const RunRecord* record = find(run);
    if (record == nullptr && has_bytes(run)) {
      return operation.refused(Call::kMap, "run " + to_string(run) + " is not reserved");
    }
    if (record == nullptr) continue;
    for (const PoolPart& part : record->parts) {
      if (!std::ranges::all_of(part.extents.shares(), &Share::holds)) {
        return operation.refused(Call::kMap, "run " + to_string(run) + " lacks handles; reserve it again");
      }
      const Pool& pool = *pools_[part.pool];
      pool.geometry.append_fills(run, pool.table.base(), fills);
      fill_pools.resize(fills.size(), part.pool);
    }
  }
  const auto step = [&](std::size_t pool, Share& share) { return pools_[pool]->table.map_share(share); };
  for (const Run& run : runs) {
    RunRecord* record = find(run);
    if (record != nullptr && !walk(operation, *record, OnRefusal::kStop, step)) return operation.finish();
  }
  return fill(operation, fills, fill_pools);
}

Outcome Backing::fill(Operation& operation, const std::vector<StridedFill>& fills,
                      const std::vector<std::size_t>& pools) {
  if (fills.empty()) return operation.finish();
  const auto range_of = [&](std::size_t i) {
    const std::uint64_t bytes = (fills[i].rows - 1) * fills[i].row_bytes + fills[i].bytes;
    return ByteRange{.offset = fills[i].start - pools_[pools[i]]->table.base(), .bytes = bytes};
  };
  for (std::size_t i = 0; i < fills.size(); ++i) {
    const Result result = device_->fill(fills[i]);
    if (result.ok()) continue;
    operation.fail(result, pools[i], range_of(i));
    break;
  }
  // Also after a refusal: no write may be under way when the caller hears of it.
  const Result result = device_->finish_fills();
  if (!result.ok()) operation.fail(result, pools.back(), range_of(fills.size() - 1));
  return operation.finish();
}

Outcome Backing::unmap(const Runs& runs) {
  Operation operation(*this);
  if (std::string why = operation.refusal(runs); !why.empty()) return operation.refused(Call::kUnmap, std::move(why));
  const auto step = [&](std::size_t pool, Share& share) { return pools_[pool]->table.unmap_share(share); };
  for (const Run& run : runs) {
    RunRecord* record = find(run);
    if (record != nullptr && !walk(operation, *record, OnRefusal::kStop, step)) break;
  }
  return operation.finish();
}

Outcome Backing::release(const Runs& runs) {
  Operation operation(*this);
  if (std::string why = operation.refusal(runs); !why.empty()) return operation.refused(Call::kRelease, std::move(why));
  const auto is_mapped = [this](const Run& run) {
    const RunRecord* record = find(run);
    return record != nullptr && std::ranges::any_of(record->parts, [](const PoolPart& part) {
             return std::ranges::any_of(part.extents.shares(), &Share::maps);
           });
  };
  if (const auto mapped = std::ranges::find_if(runs, is_mapped); mapped != runs.end()) {
    return operation.refused(Call::kRelease, "run " + to_string(*mapped) + " is still mapped");
  }
  for (const Run& run : runs) {
    release_orphans(operation, run);
    RunRecord* record = find(run);
    if (record == nullptr) continue;
    walk(operation, *record, OnRefusal::kGoOn,
         [&](std::size_t pool, Share& share) { return pools_[pool]->table.release_share(share, run); });
    detach_if_idle(run);
  }
  return operation.finish();
}

void Backing::release_orphans(Operation& operation, const Run& run) {
  for (std::size_t pool = 0; pool < pools_.size(); ++pool) {
    ByteRange refused;
    const Result result = pools_[pool]->table.release_orphans(run, refused);
    if (!result.ok()) operation.fail(result, pool, refused);
  }
}

void Backing::close() {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(closed_, true) || !device_->in_owner_process()) return;
  give_back_everything();
  for (const auto& pool : pools_) free_addresses(*pool);
}

void Backing::give_back_everything() {
  constexpr int kTries = 2;  // a driver that refused once is asked once more; nobody is left to ask later
  for (int i = 0; i < kTries; ++i) {
    for (auto& [domain, records] : runs_) {
      for (auto& [first, record] : records) {
        for (PoolPart& part : record.parts) {
          ExtentTable& table = pools_[part.pool]->table;
          for (Share& share : part.extents.shares()) {
            // A handle under a mapping that stays is not released: it would not give the memory back.
            if (table.unmap_share(share).ok()) table.release_share(share, record.run);
          }
        }
      }
    }
    for (const auto& pool : pools_) pool->table.release_all_orphans();
  }
  runs_.clear();
}

std::vector<Backing::ExtentView> Backing::extents(std::size_t pool) {
  const std::scoped_lock lock(mutex_);
  std::map<std::uint64_t, ExtentView> by_offset;
  for (const auto& [domain, records] : runs_) {
    for (const auto& [first, record] : records) {
      for (const PoolPart& part : record.parts) {
        if (part.pool != pool) continue;
        for (const Share& share : part.extents.shares()) {
          const Extent& extent = *share.extent;
          if (extent.state == ExtentState::kEmpty) continue;
          by_offset[extent.range.offset] = {.range = extent.range, .state = extent.state, .holders = extent.holders};
        }
      }
    }
  }
  const auto views = std::views::values(by_offset);
  return {views.begin(), views.end()};
}

void Backing::add_export(std::size_t pool) {
  const std::scoped_lock lock(mutex_);
  ++pools_[pool]->exports;
}

void Backing::drop_export(std::size_t pool) {
  const std::scoped_lock lock(mutex_);
  --pools_[pool]->exports;
  if (closed_ && device_->in_owner_process()) free_addresses(*pools_[pool]);
}

}  // namespace kvcached_dist
