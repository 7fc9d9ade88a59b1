// CudaDriver: the few entry points of the CUDA driver that we use, found at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvcached_dist::cuda {

// Declared here and not taken from CUDA's headers: one build works with every driver, and none is needed to
// build. The layouts and values are the driver's documented binary interface, fixed since CUDA 11.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUmemHandle = std::uint64_t;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kInvalidValue = 1;
inline constexpr CUresult kOutOfMemory = 2;

inline constexpr int kAttributeVirtualMemory = 102;    // ..._VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
inline constexpr int kAttributeRdmaWithVmm = 110;      // ..._GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
inline constexpr int kAllocationPinned = 1;            // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kLocationDevice = 1;              // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kAccessReadWrite = 3;             // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kGranularityMinimum = 0;          // CU_MEM_ALLOC_GRANULARITY_MINIMUM
inline constexpr unsigned kStreamNonBlocking = 1;      // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventBlockingNoTiming = 3;  // CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING
inline constexpr int kCaptureModeRelaxed = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED

struct CUmemLocation {
  int type = kLocationDevice;
  int id = 0;
};

struct CUmemAllocationProp {
  int type = kAllocationPinned;
  int requested_handle_types = 0;
  CUmemLocation location;
  void* win32_handle_meta_data = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    std::uint16_t usage = 0;
    std::array<unsigned char, 4> reserved{};
  } alloc_flags;
};
static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, alloc_flags) == 24);

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags = kAccessReadWrite;
};
static_assert(sizeof(CUmemAccessDesc) == 12);

struct Driver {
  CUresult (*init)(unsigned flags);
  CUresult (*get_error_name)(CUresult error, const char** name);
  CUresult (*device_get_count)(int* count);
  CUresult (*device_get)(CUdevice* device, int ordinal);
  CUresult (*device_get_attribute)(int* value, int attribute, CUdevice device);
  CUresult (*device_get_pci_bus_id)(char* id, int length, CUdevice device);
  CUresult (*primary_ctx_retain)(CUcontext* context, CUdevice device);
  CUresult (*primary_ctx_release)(CUdevice device);
  CUresult (*ctx_push)(CUcontext context);
  CUresult (*ctx_pop)(CUcontext* context);
  CUresult (*exchange_capture_mode)(int* mode);
  CUresult (*mem_get_info)(std::size_t* free_bytes, std::size_t* total_bytes);
  CUresult (*mem_get_granularity)(std::size_t* bytes, const CUmemAllocationProp* prop, int option);
  CUresult (*mem_address_reserve)(CUdeviceptr* address, std::size_t bytes, std::size_t alignment, CUdeviceptr hint,
                                  std::uint64_t flags);
  CUresult (*mem_address_free)(CUdeviceptr address, std::size_t bytes);
  CUresult (*mem_create)(CUmemHandle* handle, std::size_t bytes, const CUmemAllocationProp* prop, std::uint64_t flags);
  CUresult (*mem_release)(CUmemHandle handle);
  CUresult (*mem_map)(CUdeviceptr address, std::size_t bytes, std::size_t offset, CUmemHandle handle,
                      std::uint64_t flags);
  CUresult (*mem_set_access)(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* desc, std::size_t count);
  CUresult (*mem_unmap)(CUdeviceptr address, std::size_t bytes);
  CUresult (*memset_d8)(CUdeviceptr start, unsigned char value, std::size_t count, CUstream stream);
  CUresult (*memset_d32)(CUdeviceptr start, unsigned value, std::size_t count, CUstream stream);
  CUresult (*memset_2d8)(CUdeviceptr start, std::size_t pitch, unsigned char value, std::size_t width,
                         std::size_t height, CUstream stream);
  CUresult (*memset_2d32)(CUdeviceptr start, std::size_t pitch, unsigned value, std::size_t width, std::size_t height,
                          CUstream stream);
  CUresult (*stream_create)(CUstream* stream, unsigned flags);
  CUresult (*stream_destroy)(CUstream stream);
  CUresult (*event_create)(CUevent* event, unsigned flags);
  CUresult (*event_record)(CUevent event, CUstream stream);
  CUresult (*event_synchronize)(CUevent event);
  CUresult (*event_destroy)(CUevent event);
};

// The driver of this machine, loaded and initialised at the first call, or nullptr with the reason. Thread-safe.
const Driver* driver(std::string& reason);

std::string error_name(const Driver& driver, CUresult code);

}  // namespace kvcached_dist::cuda
