#include "cuda_vmm.hpp"

#include <array>
#include <stdexcept>
#include <tuple>

namespace kvcached_dist {
namespace {

constexpr std::uint64_t kWordBytes = sizeof(std::uint32_t);

Result result_of(cuda::CUresult code) {
  switch (code) {
    case cuda::kSuccess:
      return {};
    case cuda::kOutOfMemory:
      return {.status = Status::kOutOfMemory, .code = code};
    case cuda::kInvalidValue:
      return {.status = Status::kInvalidArgument, .code = code};
    default:
      return {.status = Status::kDriverError, .code = code};
  }
}

}  // namespace

// The context is pushed and popped, so the caller's own current device stays what it was. Capture mode is relaxed
// meanwhile: in the default mode our calls would invalidate a graph that another thread is capturing.
class CudaDevice::Current {
 public:
  explicit Current(const CudaDevice& device) : driver_(*device.driver_), code_(driver_.ctx_push(device.context_)) {
    if (code_ != cuda::kSuccess) return;
    pushed_ = true;
    code_ = driver_.exchange_capture_mode(&capture_mode_);
    relaxed_ = code_ == cuda::kSuccess;
  }
  ~Current() {
    if (relaxed_) driver_.exchange_capture_mode(&capture_mode_);
    cuda::CUcontext popped = nullptr;
    if (pushed_) driver_.ctx_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  Current(Current&&) = delete;
  Current& operator=(Current&&) = delete;

  // Runs `call` if the device could be made current.
  template <typename Call>
  [[nodiscard]] Result run(const Call& call) const {
    return result_of(code_ == cuda::kSuccess ? call(driver_) : code_);
  }

 private:
  const cuda::Driver& driver_;
  cuda::CUresult code_;
  int capture_mode_ = cuda::kCaptureModeRelaxed;  // exchanged: holds the caller's mode until the end
  bool pushed_ = false;
  bool relaxed_ = false;
};

bool cuda_available(std::string& reason) {
  const cuda::Driver* driver = cuda::driver(reason);
  if (driver == nullptr) return false;
  cuda::CUdevice device = 0;
  int supported = 0;
  if (driver->device_get(&device, 0) == cuda::kSuccess) {
    driver->device_get_attribute(&supported, cuda::kAttributeVirtualMemory, device);
  }
  if (supported == 0) reason = "the driver reports no virtual-memory management for device 0";
  return supported != 0;
}

CudaDevice::CudaDevice(int ordinal) : Device(DeviceKind::kCuda, ordinal) {
  std::string reason;
  driver_ = cuda::driver(reason);
  if (driver_ == nullptr) throw std::runtime_error(reason);
  require(driver_->device_get(&device_, ordinal), "cuDeviceGet");
  int supported = 0;
  require(driver_->device_get_attribute(&supported, cuda::kAttributeVirtualMemory, device_), "cuDeviceGetAttribute");
  if (supported == 0) {
    throw std::runtime_error("CUDA device " + std::to_string(ordinal) + " has no virtual-memory management");
  }
  try {
    start();
  } catch (...) {
    stop();
    throw;
  }
}

CudaDevice::~CudaDevice() { stop(); }

void CudaDevice::require(cuda::CUresult code, const char* what) const {
  if (code == cuda::kSuccess) return;
  throw std::runtime_error("CUDA device " + std::to_string(ordinal()) + ": " + what + ": " +
                           cuda::error_name(*driver_, code));
}

void CudaDevice::start() {
  require(driver_->primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  prop_.location.id = device_;
  int rdma = 0;
  if (driver_->device_get_attribute(&rdma, cuda::kAttributeRdmaWithVmm, device_) == cuda::kSuccess && rdma != 0) {
    prop_.alloc_flags.gpu_direct_rdma_capable = 1;  // KV transfer engines register these buffers with the NIC
  }
  std::size_t granule = 0;
  require(driver_->mem_get_granularity(&granule, &prop_, cuda::kGranularityMinimum), "cuMemGetAllocationGranularity");
  set_granule_bytes(granule);
  std::array<char, 32> pci{};
  require(driver_->device_get_pci_bus_id(pci.data(), pci.size(), device_), "cuDeviceGetPCIBusId");
  set_card_id(pci.data());
  const Current current(*this);
  const Result made = current.run([&](const auto& cu) { return cu.stream_create(&stream_, cuda::kStreamNonBlocking); });
  require(made.code, "cuStreamCreate");
}

void CudaDevice::stop() {
  if (context_ == nullptr || !in_owner_process()) return;
  {
    const Current current(*this);
    if (stream_ != nullptr) std::ignore = current.run([&](const auto& cu) { return cu.stream_destroy(stream_); });
  }
  stream_ = nullptr;
  context_ = nullptr;
  driver_->primary_ctx_release(device_);
}

Result CudaDevice::memory_info(MemoryInfo& info) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  const Result result = Current(*this).run([&](const auto& cu) { return cu.mem_get_info(&free_bytes, &total_bytes); });
  info = {.free_bytes = free_bytes, .total_bytes = total_bytes};
  return result;
}

std::string CudaDevice::explain(int code) const { return cuda::error_name(*driver_, code); }

Result CudaDevice::do_reserve(std::uint64_t bytes, Address& address) {
  cuda::CUdeviceptr start = 0;
  const Result result =
      Current(*this).run([&](const auto& cu) { return cu.mem_address_reserve(&start, bytes, granule_bytes(), 0, 0); });
  if (result.ok()) address = start;
  return result;
}

Result CudaDevice::do_free_address(Address address, std::uint64_t bytes) {
  return Current(*this).run([&](const auto& cu) { return cu.mem_address_free(address, bytes); });
}

Result CudaDevice::do_create(std::uint64_t bytes, Handle& handle) {
  return Current(*this).run([&](const auto& cu) { return cu.mem_create(&handle, bytes, &prop_, 0); });
}

Result CudaDevice::do_release(Handle handle, std::uint64_t /*bytes*/) {
  return Current(*this).run([&](const auto& cu) { return cu.mem_release(handle); });
}

Result CudaDevice::do_map(Address address, std::uint64_t bytes, Handle handle) {
  return Current(*this).run([&](const auto& cu) { return cu.mem_map(address, bytes, 0, handle, 0); });
}

Result CudaDevice::do_access(Address address, std::uint64_t bytes) {
  const cuda::CUmemAccessDesc desc{.location = prop_.location};
  return Current(*this).run([&](const auto& cu) { return cu.mem_set_access(address, bytes, &desc, 1); });
}

Result CudaDevice::do_unmap(Address address, std::uint64_t bytes) {
  return Current(*this).run([&](const auto& cu) { return cu.mem_unmap(address, bytes); });
}

Result CudaDevice::do_fill(const StridedFill& fill) {
  const bool words = fill.start % kWordBytes == 0 && fill.row_bytes % kWordBytes == 0 && fill.bytes % kWordBytes == 0;
  const auto byte = static_cast<unsigned char>(fill.pattern & 0xFFU);
  return Current(*this).run([&](const auto& cu) {
    if (fill.rows == 1) {
      return words ? cu.memset_d32(fill.start, fill.pattern, fill.bytes / kWordBytes, stream_)
                   : cu.memset_d8(fill.start, byte, fill.bytes, stream_);
    }
    return words ? cu.memset_2d32(fill.start, fill.row_bytes, fill.pattern, fill.bytes / kWordBytes, fill.rows, stream_)
                 : cu.memset_2d8(fill.start, fill.row_bytes, byte, fill.bytes, fill.rows, stream_);
  });
}

Result CudaDevice::do_finish_fills() {
  // An event of this call alone: another thread may be waiting for its own fills on the same stream.
  return Current(*this).run([&](const auto& cu) {
    cuda::CUevent event = nullptr;
    cuda::CUresult code = cu.event_create(&event, cuda::kEventBlockingNoTiming);
    if (code != cuda::kSuccess) return code;
    code = cu.event_record(event, stream_);
    if (code == cuda::kSuccess) code = cu.event_synchronize(event);
    cu.event_destroy(event);
    return code;
  });
}

}  // namespace kvcached_dist
