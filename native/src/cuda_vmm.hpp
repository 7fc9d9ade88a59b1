// CudaDevice: a CUDA card through the virtual-memory calls of its driver.
#pragma once

#include <cstdint>
#include <string>

#include "cuda_driver.hpp"
#include "vmm.hpp"

namespace kvcached_dist {

// Retains the primary context (the one that torch uses) and makes it current for the length of each call, in
// whichever thread calls. Fills go to a private non-blocking stream and are waited for by an event; nothing here
// waits for the device.
class CudaDevice final : public Device {
 public:
  // `ordinal` counts the devices visible to this process. Throws std::runtime_error with the reason.
  explicit CudaDevice(int ordinal);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  CudaDevice(CudaDevice&&) = delete;
  CudaDevice& operator=(CudaDevice&&) = delete;

  Result memory_info(MemoryInfo& info) override;
  [[nodiscard]] std::string explain(int code) const override;

 private:
  class Current;  // this device, for the length of one call

  Result do_reserve(std::uint64_t bytes, Address& address) override;
  Result do_free_address(Address address, std::uint64_t bytes) override;
  Result do_create(std::uint64_t bytes, Handle& handle) override;
  Result do_release(Handle handle, std::uint64_t bytes) override;
  Result do_map(Address address, std::uint64_t bytes, Handle handle) override;
  Result do_access(Address address, std::uint64_t bytes) override;
  Result do_unmap(Address address, std::uint64_t bytes) override;
  Result do_fill(const StridedFill& fill) override;
  Result do_finish_fills() override;

  void start();
  void stop();
  void require(cuda::CUresult code, const char* what) const;

  const cuda::Driver* driver_ = nullptr;
  cuda::CUdevice device_ = 0;
  cuda::CUcontext context_ = nullptr;
  cuda::CUstream stream_ = nullptr;
  cuda::CUmemAllocationProp prop_;
};

// Whether a CudaDevice can be made here; `reason` says why not.
bool cuda_available(std::string& reason);

}  // namespace kvcached_dist
