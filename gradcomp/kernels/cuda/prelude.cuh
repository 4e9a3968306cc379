// What NVRTC, which has no standard library, needs to compile the headers of native/.
namespace std {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
using size_t = unsigned long;
using ::memcpy;
}  // namespace std

#define INT32_MIN (-2147483647 - 1)
#define __builtin_inff() __int_as_float(0x7F800000)
#define __builtin_sqrt(x) sqrt(x)
#define __builtin_fminf(a, b) fminf(a, b)
#define __builtin_fmaxf(a, b) fmaxf(a, b)

// Bring a line of global memory to the cache that all processors share.
inline void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
