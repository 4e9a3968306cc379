// Half precision in the low 16 bits of each lane: by integer arithmetic, for vectors that have no instruction
// for it, and by the instructions of a GPU.
#pragma once

namespace gradcomp::GRADCOMP_BODY {

#ifdef __CUDA_ARCH__

// An instruction each way; what becomes of NaN is defined here, as no instruction does the same everywhere.
inline F32 from_half(I32 half) {
    F32 x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x.v) : "h"(static_cast<std::uint16_t>(half.v)));
    const std::int32_t magnitude = half.v & 0x7FFF;
    return magnitude <= 0x7C00 ? x : as_float(I32{0x7F800000 | magnitude << 13 | (half.v & 0x8000) << 16});
}
inline I32 to_half(F32 x) {
    std::uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x.v));
    const std::int32_t nan = 0x7E00 | (unsigned_of(as_int(x)) >> 16 & 0x8000);
    return {x.v == x.v ? std::int32_t{half} : nan};
}

#else

inline F32 from_half(I32 half) {
    const I32 magnitude = shift_left(half & splat(0x7FFF), 13);
    // The exponent bias differs by 112; the product is exact, for subnormal halves too.
    const I32 finite = as_int(as_float(magnitude) * splat(0x1p112f));
    const I32 special = less(splat(0x7BFF), half & splat(0x7FFF));
    const I32 sign = shift_left(half & splat(0x8000), 16);
    return as_float(finite | (special & splat(0x7F800000)) | sign);
}
inline I32 to_half(F32 x) {
    const I32 magnitude = as_int(x) & splat(0x7FFFFFFF);
    const I32 odd = shift_right(magnitude, 13) & splat(1);
    const I32 normal = shift_right(magnitude + splat(0xFFF - (112 << 23)) + odd, 13);
    // At 1/2 the spacing of floats is that of subnormal halves, so the addition rounds.
    const I32 subnormal = as_int(as_float(magnitude) + splat(0.5f)) - as_int(splat(0.5f));
    const auto select = [](I32 mask, I32 yes, I32 no) { return (mask & yes) | ((mask ^ splat(-1)) & no); };
    I32 half = select(less(magnitude, as_int(splat(0x1p-14f))), subnormal, normal);
    half = select(less(magnitude, as_int(splat(65520.0f))), half, splat(0x7C00));
    half = select(less(splat(0x7F800000), magnitude), splat(0x7E00), half);
    return half | (shift_right(as_int(x), 16) & splat(0x8000));
}

#endif

}  // namespace gradcomp::GRADCOMP_BODY
