// The virtual-memory calls of the driver and nothing else, to see what they cost by themselves.
#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <vector>

namespace {

using Result = int;
using Address = unsigned long long;
using Handle = unsigned long long;

struct Location {
  int type;
  int id;
};
struct Prop {
  int type = 1;  // pinned
  int requested_handle_types = 0;
  Location location{1, 0};  // device
  void* win32 = nullptr;
  struct {
    unsigned char compression = 0;
    unsigned char rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
struct Access {
  Location location;
  int flags;
};

constexpr int kReadWrite = 3;
constexpr int kRdmaWithVmm = 110;  // device attribute; the package's own handles ask for it where it is there

Result (*init)(unsigned);
Result (*device_get)(int*, int);
Result (*get_attribute)(int*, int, int);
Result (*ctx_retain)(void**, int);
Result (*ctx_set)(void*);
Result (*reserve)(Address*, std::size_t, std::size_t, Address, unsigned long long);
Result (*free_address)(Address, std::size_t);
Result (*create)(Handle*, std::size_t, const Prop*, unsigned long long);
Result (*map)(Address, std::size_t, std::size_t, Handle, unsigned long long);
Result (*set_access)(Address, std::size_t, const Access*, std::size_t);
Result (*unmap)(Address, std::size_t);
Result (*release)(Handle);

Prop prop;
void* context = nullptr;

template <typename Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

double micros_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

extern "C" int bare_open(int ordinal) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return -1;
  const bool loaded =
      load(library, "cuInit", init) && load(library, "cuDeviceGet", device_get) &&
      load(library, "cuDeviceGetAttribute", get_attribute) &&
      load(library, "cuDevicePrimaryCtxRetain", ctx_retain) && load(library, "cuCtxSetCurrent", ctx_set) &&
      load(library, "cuMemAddressReserve", reserve) && load(library, "cuMemAddressFree", free_address) &&
      load(library, "cuMemCreate", create) && load(library, "cuMemMap", map) &&
      load(library, "cuMemSetAccess", set_access) && load(library, "cuMemUnmap", unmap) &&
      load(library, "cuMemRelease", release);
  if (!loaded) return -2;
  int device = 0;
  if (const Result code = init(0); code != 0) return code;
  if (const Result code = device_get(&device, ordinal); code != 0) return code;
  if (const Result code = ctx_retain(&context, device); code != 0) return code;
  prop.location.id = device;
  int rdma = 0;
  if (get_attribute(&rdma, kRdmaWithVmm, device) == 0 && rdma != 0) prop.flags.rdma = 1;
  return ctx_set(context);
}

extern "C" int bare_cycle(const std::uint64_t* sizes, std::size_t count, double* micros) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += sizes[i];
  micros[0] = micros[1] = 0;
  if (total == 0) return 0;
  Address base = 0;
  if (const Result code = reserve(&base, total, 2 << 20, 0, 0); code != 0) return code;
  std::vector<Handle> handles(count);
  const Access access{prop.location, kReadWrite};
  auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < count; ++i) {
    if (const Result code = create(&handles[i], sizes[i], &prop, 0); code != 0) return code;
  }
  Address at = base;
  for (std::size_t i = 0; i < count; at += sizes[i++]) {
    if (const Result code = map(at, sizes[i], 0, handles[i], 0); code != 0) return code;
    if (const Result code = set_access(at, sizes[i], &access, 1); code != 0) return code;
  }
  micros[0] = micros_since(start);
  start = std::chrono::steady_clock::now();
  at = base;
  for (std::size_t i = 0; i < count; at += sizes[i++]) {
    if (const Result code = unmap(at, sizes[i]); code != 0) return code;
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (const Result code = release(handles[i]); code != 0) return code;
  }
  micros[1] = micros_since(start);
  return free_address(base, total);
}
