// The Python face. Only conversions and the GIL live here; kvcached_dist/_native.pyi documents the classes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "backing.hpp"
#include "block_pool.hpp"
#include "cuda_vmm.hpp"
#include "host_vmm.hpp"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): the "name"_a literals

namespace kvcached_dist {
namespace {

using PyRuns = std::vector<std::tuple<int, std::int64_t, std::int64_t>>;
using PyRange = std::tuple<std::uint64_t, std::uint64_t>;
using PyFill = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>;
using PyTotals = std::map<std::string, std::uint64_t>;
using Blocks = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NumpyBlocks = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;
using ByteArray = nb::ndarray<nb::array_api, std::uint8_t, nb::ndim<1>>;

Backing::Runs runs_from(const PyRuns& runs) {
  Backing::Runs converted;
  converted.reserve(runs.size());
  for (const auto& [domain, first, count] : runs) {
    converted.push_back({.domain = domain, .first = first, .count = count});
  }
  return converted;
}

PyTotals totals_from(const FaultHook::Totals& totals) {
  PyTotals named;
  for (std::size_t i = 0; i < kCallCount; ++i) named.emplace(kCallNames[i], totals[i]);
  return named;
}

void arm(FaultHook& faults, const std::string& call, std::int64_t nth, std::int64_t count, std::int64_t delay_us,
         bool fail) {
  const std::optional<Call> known = call_named(call);
  if (!known.has_value()) {
    throw std::invalid_argument("call '" + call + "' is none of reserve, create, map, access, fill, unmap, release");
  }
  if (nth < 1 || count < 1 || delay_us < 0) {
    throw std::invalid_argument("a fault needs nth >= 1, count >= 1 and delay_us >= 0");
  }
  faults.arm({.call = *known,
              .nth = static_cast<std::uint64_t>(nth),
              .count = static_cast<std::uint64_t>(count),
              .delay = std::chrono::microseconds(delay_us),
              .fail = fail});
}

MemoryInfo memory_of(Device& device) {
  MemoryInfo info;
  const Result result = device.memory_info(info);
  if (!result.ok()) {
    throw std::runtime_error("card " + device.card_id() + ": cannot read free memory: " + device.explain(result.code));
  }
  return info;
}

PoolGeometry geometry_from(std::string name, int domain, std::int64_t pages, std::uint64_t reservation_bytes,
                           const std::vector<PyRange>& lanes, const std::vector<PyRange>& pinned,
                           const std::vector<PyFill>& fill, std::uint64_t fill_row_bytes) {
  PoolGeometry geometry{.name = std::move(name),
                        .domain = domain,
                        .pages = pages,
                        .reservation_bytes = reservation_bytes,
                        .lanes = {},
                        .pinned = {},
                        .fill = {},
                        .fill_row_bytes = fill_row_bytes};
  for (const auto& [base, page_bytes] : lanes) geometry.lanes.push_back({.base = base, .page_bytes = page_bytes});
  for (const auto& [offset, bytes] : pinned) geometry.pinned.push_back({.offset = offset, .bytes = bytes});
  for (const auto& [offset, bytes, pattern] : fill) {
    geometry.fill.push_back({.offset = offset, .bytes = bytes, .pattern = pattern});
  }
  geometry.validate();
  return geometry;
}

std::string repr_of(const Outcome& outcome) {
  if (outcome.ok()) return "Outcome(ok, micros=" + std::to_string(outcome.micros) + ")";
  return "Outcome(" + outcome.detail + ")";
}

std::size_t checked_pool(const Backing& backing, std::int64_t pool) {
  if (pool >= 0 && static_cast<std::size_t>(pool) < backing.pool_count()) return static_cast<std::size_t>(pool);
  throw nb::index_error(
      ("pool " + std::to_string(pool) + " of " + std::to_string(backing.pool_count()) + " pools").c_str());
}

const char* name_of(ExtentState state) {
  switch (state) {
    case ExtentState::kEmpty:
      return "empty";
    case ExtentState::kHeld:
      return "held";
    case ExtentState::kMapped:
      return "no_access";
    case ExtentState::kAccessible:
      return "mapped";
  }
  return "unknown";
}

// What an array holds on to: the backing, so that it is not taken apart underneath, and a count in it.
struct Export {
  nb::object owner;
  Backing* backing;
  std::size_t pool;
};

ByteArray array_of(const nb::object& self, std::int64_t index) {
  auto& backing = nb::cast<Backing&>(self);
  const std::size_t pool = checked_pool(backing, index);
  backing.add_export(pool);
  const nb::capsule owner(new Export{.owner = self, .backing = &backing, .pool = pool}, [](void* data) noexcept {
    const std::unique_ptr<Export> exported(static_cast<Export*>(data));
    const nb::gil_scoped_release unlocked;
    exported->backing->drop_export(exported->pool);
  });
  const bool on_host = backing.device().kind() == DeviceKind::kHost;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the address came from the device as an integer
  auto* data = reinterpret_cast<std::uint8_t*>(backing.table(pool).base());
  return {data,
          {static_cast<std::size_t>(backing.geometry(pool).reservation_bytes)},
          owner,
          {},
          nb::dtype<std::uint8_t>(),
          on_host ? nb::device::cpu::value : nb::device::cuda::value,
          on_host ? 0 : backing.device().ordinal()};
}

std::vector<std::tuple<std::uint64_t, std::uint64_t, std::string, std::uint32_t>> extents_of(Backing& backing,
                                                                                             std::int64_t pool) {
  const std::size_t index = checked_pool(backing, pool);
  std::vector<Backing::ExtentView> views;
  {
    const nb::gil_scoped_release unlocked;
    views = backing.extents(index);
  }
  std::vector<std::tuple<std::uint64_t, std::uint64_t, std::string, std::uint32_t>> listed;
  listed.reserve(views.size());
  for (const auto& [range, state, holders] : views) {
    listed.emplace_back(range.offset, range.bytes, name_of(state), holders);
  }
  return listed;
}

template <typename Total>
auto per_pool(Total total) {
  return [total](const Backing& backing) {
    std::vector<std::int64_t> totals;
    totals.reserve(backing.pool_count());
    for (std::size_t i = 0; i < backing.pool_count(); ++i) {
      totals.push_back(static_cast<std::int64_t>((backing.table(i).*total)()));
    }
    return totals;
  };
}

template <typename Method>
auto on_runs(Method method) {
  return [method](Backing& backing, const PyRuns& runs) {
    const Backing::Runs converted = runs_from(runs);
    const nb::gil_scoped_release unlocked;
    return (backing.*method)(converted);
  };
}

// Takes microseconds at most, so it keeps the GIL: giving it up can cost milliseconds under a busy interpreter.
std::optional<NumpyBlocks> alloc(BlockPool& pool, std::int64_t count) {
  if (count < 0) throw std::invalid_argument("cannot allocate " + std::to_string(count) + " blocks");
  if (count > pool.available()) return std::nullopt;
  const auto size = static_cast<std::size_t>(count);
  auto blocks = std::make_unique_for_overwrite<std::int64_t[]>(size);  // NOLINT(*-avoid-c-arrays): numpy takes it over
  pool.alloc({blocks.get(), size});
  std::int64_t* data = blocks.get();
  const nb::capsule owner(blocks.release(), [](void* memory) noexcept { delete[] static_cast<std::int64_t*>(memory); });
  return NumpyBlocks(data, {size}, owner);
}

void bind_devices(nb::module_& m) {
  nb::enum_<Status>(m, "Status", nb::is_arithmetic(), "What a call that touches memory answered.")
      .value("OK", Status::kOk)
      .value("OUT_OF_MEMORY", Status::kOutOfMemory)
      .value("INVALID_ARGUMENT", Status::kInvalidArgument)
      .value("DRIVER_ERROR", Status::kDriverError)
      .value("INJECTED", Status::kInjected);

  nb::class_<Counters>(m, "Counters", "What a device has done, and what is alive; a copy.")
      .def_ro("handles_created", &Counters::handles_created)
      .def_ro("handles_released", &Counters::handles_released)
      .def_ro("bytes_created", &Counters::live_created_bytes)
      .def_ro("bytes_mapped", &Counters::live_mapped_bytes)
      .def_ro("reservations", &Counters::live_reservations)
      .def_ro("maps", &Counters::maps)
      .def_ro("unmaps", &Counters::unmaps)
      .def_ro("accesses", &Counters::accesses)
      .def_ro("fills", &Counters::fills);

  nb::class_<FaultHook>(m, "FaultHook", "Makes chosen driver calls of a device fail or take longer.")
      .def("arm", &arm, "call"_a, "nth"_a, "count"_a = 1, "delay_us"_a = 0, "fail"_a = true)
      .def("clear", &FaultHook::clear)
      .def("hits", [](const FaultHook& faults) { return totals_from(faults.hits()); })
      .def("seen", [](const FaultHook& faults) { return totals_from(faults.seen()); });

  nb::class_<Device>(m, "Device", "One card: granule, capacity, counters and faults.")
      .def_prop_ro("granule_bytes", &Device::granule_bytes)
      .def_prop_ro("kind", [](const Device& device) { return device.kind() == DeviceKind::kHost ? "host" : "cuda"; })
      .def_prop_ro("ordinal", &Device::ordinal)
      .def_prop_ro("card_id", &Device::card_id)
      .def_prop_ro("private", &Device::is_private)
      .def_prop_ro("faults", &Device::faults, nb::rv_policy::reference_internal)
      .def(
          "total_bytes", [](Device& device) { return memory_of(device).total_bytes; },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "free_bytes", [](Device& device) { return memory_of(device).free_bytes; },
          nb::call_guard<nb::gil_scoped_release>())
      .def("counters", &Device::counters);

  nb::class_<HostDevice, Device>(m, "HostDevice", "A card of host memory with the rules of the CUDA driver.")
      .def(nb::init<std::uint64_t, std::uint64_t, std::string, std::string>(), "capacity_bytes"_a,
           "granule_bytes"_a = std::uint64_t{2} << 20U, "card"_a = "", "card_file"_a = "")
      .def("resident_bytes", &HostDevice::resident_bytes);

  nb::class_<CudaDevice, Device>(m, "CudaDevice", "A CUDA card through the virtual-memory calls of its driver.")
      .def(nb::init<int>(), "ordinal"_a, nb::call_guard<nb::gil_scoped_release>());

  m.def("cuda_available", [] {
    const nb::gil_scoped_release unlocked;
    std::string reason;
    const bool available = cuda_available(reason);
    return std::pair(available, reason);
  });
}

void bind_backing(const nb::module_& m) {
  nb::class_<PoolGeometry>(m, "PoolGeometry", "Where the bytes of a pool lie in its reservation.")
      .def(nb::new_(&geometry_from), nb::kw_only(), "name"_a, "domain"_a, "pages"_a, "reservation_bytes"_a, "lanes"_a,
           "pinned"_a = std::vector<PyRange>{}, "fill"_a = std::vector<PyFill>{}, "fill_row_bytes"_a = 0)
      .def_ro("name", &PoolGeometry::name)
      .def_ro("domain", &PoolGeometry::domain)
      .def_ro("pages", &PoolGeometry::pages)
      .def_ro("reservation_bytes", &PoolGeometry::reservation_bytes)
      .def_ro("fill_row_bytes", &PoolGeometry::fill_row_bytes)
      .def_prop_ro("lanes",
                   [](const PoolGeometry& geometry) {
                     std::vector<PyRange> lanes;
                     lanes.reserve(geometry.lanes.size());
                     for (const Lane& lane : geometry.lanes) lanes.emplace_back(lane.base, lane.page_bytes);
                     return lanes;
                   })
      .def_prop_ro("pinned",
                   [](const PoolGeometry& geometry) {
                     std::vector<PyRange> ranges;
                     ranges.reserve(geometry.pinned.size());
                     for (const ByteRange& range : geometry.pinned) ranges.emplace_back(range.offset, range.bytes);
                     return ranges;
                   })
      .def_prop_ro("fill", [](const PoolGeometry& geometry) {
        std::vector<PyFill> pieces;
        pieces.reserve(geometry.fill.size());
        for (const FillPiece& piece : geometry.fill) pieces.emplace_back(piece.offset, piece.bytes, piece.pattern);
        return pieces;
      });

  nb::class_<Outcome>(m, "Outcome", "What a call of Backing did.")
      .def_prop_ro("ok", &Outcome::ok)
      .def_prop_ro("exhausted", &Outcome::exhausted)
      .def_prop_ro("call", [](const Outcome& outcome) { return outcome.ok() ? "" : name_of(outcome.call).data(); })
      .def_ro("status", &Outcome::status)
      .def_ro("pool", &Outcome::pool)
      .def_ro("offset", &Outcome::offset)
      .def_ro("bytes", &Outcome::bytes)
      .def_ro("code", &Outcome::code)
      .def_ro("detail", &Outcome::detail)
      .def_ro("handles_created", &Outcome::handles_created)
      .def_ro("micros", &Outcome::micros)
      .def("__repr__", &repr_of);

  const auto plan = [](Backing& backing, const PyRuns& runs) {
    const Backing::Runs converted = runs_from(runs);
    const nb::gil_scoped_release unlocked;
    std::vector<std::tuple<std::int64_t, std::uint64_t>> planned;
    for (const auto& [handles, bytes] : backing.plan(converted)) planned.emplace_back(handles, bytes);
    return planned;
  };
  const auto reserve = [](Backing& backing, std::int64_t txn, const PyRuns& runs) {
    const Backing::Runs converted = runs_from(runs);
    const nb::gil_scoped_release unlocked;
    return backing.reserve(txn, converted);
  };
  const auto base = [](const Backing& backing, std::int64_t pool) {
    return static_cast<std::uint64_t>(backing.table(checked_pool(backing, pool)).base());
  };
  nb::class_<Backing>(m, "Backing", "Address reservations of a rank's pools and the memory behind runs of pages.")
      .def(nb::init<std::shared_ptr<Device>, std::vector<PoolGeometry>, std::uint64_t>(), "device"_a, "pools"_a,
           nb::kw_only(), "extent_bytes_max"_a = Backing::kExtentBytesMax)
      .def("plan", plan, "runs"_a)
      .def("reserve", reserve, "txn"_a, "runs"_a)
      .def("abort", &Backing::abort, "txn"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("map", on_runs(&Backing::map), "runs"_a)
      .def("unmap", on_runs(&Backing::unmap), "runs"_a)
      // The same work: what is missing is mapped, and the runs are filled again.
      .def("restore", on_runs(&Backing::map), "runs"_a)
      .def("release", on_runs(&Backing::release), "runs"_a)
      .def("held", per_pool(&ExtentTable::handles))
      .def("held_bytes", per_pool(&ExtentTable::held_bytes))
      .def("mapped_bytes", per_pool(&ExtentTable::mapped_bytes))
      .def("base", base, "pool"_a)
      .def("array", &array_of, "pool"_a)
      .def("extents", &extents_of, "pool"_a)
      .def("close", &Backing::close, nb::call_guard<nb::gil_scoped_release>());
}

void bind_block_pool(const nb::module_& m) {
  const auto free_blocks = [](BlockPool& pool, const Blocks& blocks) { pool.free({blocks.data(), blocks.size()}); };
  const auto free_at = [](BlockPool& pool, std::uintptr_t address, std::size_t count) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): tensors tell their address as an integer
    pool.free({reinterpret_cast<const std::int64_t*>(address), count});
  };
  nb::class_<BlockPool>(m, "BlockPool", "Hands out block ids deterministically, fullest page first.")
      .def(nb::init<std::int64_t, std::int64_t>(), "pages"_a, "blocks_per_page"_a)
      .def("publish", &BlockPool::publish, "first_page"_a, "count"_a)
      .def("retire", &BlockPool::retire, "first_page"_a, "count"_a)
      .def("run_is_free", &BlockPool::run_is_free, "first_page"_a, "count"_a)
      .def("sort", [](const BlockPool&) { /* the order of hand-out depends on which blocks are free alone */ })
      .def("available", &BlockPool::available)
      .def("published", &BlockPool::published)
      .def("alloc", &alloc, "n"_a)
      .def("free", free_blocks, "ids"_a)
      .def("free_at", free_at, "address"_a, "count"_a)
      .def("pin", &BlockPool::pin, "block"_a)
      .def_prop_ro("ids_digest", &BlockPool::ids_digest)
      .def("reset", &BlockPool::reset);
}

}  // namespace
}  // namespace kvcached_dist

// NOLINTNEXTLINE: the macro is nanobind's
NB_MODULE(_native, m) {
  // Engines keep pools in module globals until the interpreter ends; a report about them then is noise.
  nb::set_leak_warnings(false);
  m.doc() = "Virtual-memory backends, extent tables and the block pool of kvcached_dist.";
  kvcached_dist::bind_devices(m);
  kvcached_dist::bind_backing(m);
  kvcached_dist::bind_block_pool(m);
}
