// What selections need beyond simd_avx512.hpp.
#pragma once

#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline I32 lane_numbers() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

// Bit i is set where lane i of a < that of b.
inline std::uint32_t mask_less(I32 a, I32 b) {
    return _mm512_cmplt_epi32_mask(a.v, b.v);
}

// Write the lanes of the mask side by side. All sixteen places are written: what comes after is unspecified.
inline void compress(std::uint32_t* p, I32 x, std::uint32_t mask) {
    // Compressing to memory is slow on some processors.
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x.v));
}

// Sums in double precision, one per lane.
class LaneSums {
  public:
    void add(F32 x) {
        low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
        high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
    }
    void store(double (&lanes)[16]) const {
        _mm512_storeu_pd(lanes, low_);
        _mm512_storeu_pd(lanes + 8, high_);
    }

  private:
    __m512d low_ = _mm512_setzero_pd();
    __m512d high_ = _mm512_setzero_pd();
};

}  // namespace gradcomp::GRADCOMP_BODY
