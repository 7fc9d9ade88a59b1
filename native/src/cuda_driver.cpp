#include "cuda_driver.hpp"

#include <dlfcn.h>

namespace kvcached_dist::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

struct Loaded {
  Driver driver{};
  bool usable = false;
  std::string reason;
};

// The suffixes are the driver's own versioning: the plain names of these are kept for programs of CUDA 3.
bool resolve(void* library, Driver& driver, std::string& missing) {
  bool complete = true;
  const auto find = [&](auto& slot, const char* symbol) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(::dlsym(library, symbol));
    if (slot == nullptr && complete) {
      complete = false;
      missing = symbol;
    }
  };
  find(driver.init, "cuInit");
  find(driver.get_error_name, "cuGetErrorName");
  find(driver.device_get_count, "cuDeviceGetCount");
  find(driver.device_get, "cuDeviceGet");
  find(driver.device_get_attribute, "cuDeviceGetAttribute");
  find(driver.device_get_pci_bus_id, "cuDeviceGetPCIBusId");
  find(driver.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  find(driver.primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
  find(driver.ctx_push, "cuCtxPushCurrent_v2");
  find(driver.ctx_pop, "cuCtxPopCurrent_v2");
  find(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(driver.mem_get_info, "cuMemGetInfo_v2");
  find(driver.mem_get_granularity, "cuMemGetAllocationGranularity");
  find(driver.mem_address_reserve, "cuMemAddressReserve");
  find(driver.mem_address_free, "cuMemAddressFree");
  find(driver.mem_create, "cuMemCreate");
  find(driver.mem_release, "cuMemRelease");
  find(driver.mem_map, "cuMemMap");
  find(driver.mem_set_access, "cuMemSetAccess");
  find(driver.mem_unmap, "cuMemUnmap");
  find(driver.memset_d8, "cuMemsetD8Async");
  find(driver.memset_d32, "cuMemsetD32Async");
  find(driver.memset_2d8, "cuMemsetD2D8Async");
  find(driver.memset_2d32, "cuMemsetD2D32Async");
  find(driver.stream_create, "cuStreamCreate");
  find(driver.stream_destroy, "cuStreamDestroy_v2");
  find(driver.event_create, "cuEventCreate");
  find(driver.event_record, "cuEventRecord");
  find(driver.event_synchronize, "cuEventSynchronize");
  find(driver.event_destroy, "cuEventDestroy_v2");
  return complete;
}

Loaded load() {
  Loaded loaded;
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.reason = std::string("no CUDA driver: ") + kLibrary + " cannot be loaded";
    return loaded;
  }
  std::string missing;
  if (!resolve(library, loaded.driver, missing)) {
    loaded.reason = std::string(kLibrary) + " has no " + missing + "; a driver for CUDA 11.3 or newer is needed";
    return loaded;
  }
  const CUresult code = loaded.driver.init(0);
  if (code != kSuccess) {
    loaded.reason = "cuInit: " + error_name(loaded.driver, code);
    return loaded;
  }
  int count = 0;
  if (loaded.driver.device_get_count(&count) != kSuccess || count == 0) {
    loaded.reason = "no CUDA device is visible to this process";
    return loaded;
  }
  loaded.usable = true;
  return loaded;
}

}  // namespace

const Driver* driver(std::string& reason) {
  // Never unloaded: the driver keeps threads and exit handlers of its own.
  static const auto* loaded = new Loaded(load());
  reason = loaded->reason;
  return loaded->usable ? &loaded->driver : nullptr;
}

std::string error_name(const Driver& driver, CUresult code) {
  const char* name = nullptr;
  const bool known = driver.get_error_name(code, &name) == kSuccess && name != nullptr;
  return (known ? std::string(name) : std::string("CUDA error")) + " (" + std::to_string(code) + ")";
}

}  // namespace kvcached_dist::cuda
