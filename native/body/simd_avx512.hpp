// Sixteen lanes in one AVX-512 register (F, BW, VL, DQ).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace gradcomp::GRADCOMP_BODY {

struct F32 {
    __m512 v;
};
struct I32 {
    __m512i v;
};

inline F32 splat(float x) {
    return {_mm512_set1_ps(x)};
}
inline I32 splat(std::int32_t x) {
    return {_mm512_set1_epi32(x)};
}

inline F32 load(const float* p) {
    return {_mm512_loadu_ps(p)};
}
inline void store(float* p, F32 x) {
    _mm512_storeu_ps(p, x.v);
}
inline void stream(float* p, F32 x) {
    _mm512_stream_ps(p, x.v);
}
inline void stream_fence() {
    _mm_sfence();
}
// The cache line at an address, which need not exist.
inline void prefetch(std::uintptr_t address) {
    _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
}

inline F32 operator+(F32 a, F32 b) {
    return {_mm512_add_ps(a.v, b.v)};
}
inline F32 operator-(F32 a, F32 b) {
    return {_mm512_sub_ps(a.v, b.v)};
}
inline F32 operator*(F32 a, F32 b) {
    return {_mm512_mul_ps(a.v, b.v)};
}
inline F32 operator/(F32 a, F32 b) {
    return {_mm512_div_ps(a.v, b.v)};
}
inline F32 min(F32 a, F32 b) {
    return {_mm512_min_ps(a.v, b.v)};
}
inline F32 max(F32 a, F32 b) {
    return {_mm512_max_ps(a.v, b.v)};
}
inline float reduce_min(F32 x) {
    return _mm512_reduce_min_ps(x.v);
}
inline float reduce_add(F32 x) {
    return _mm512_reduce_add_ps(x.v);
}
inline float reduce_max(F32 x) {
    return _mm512_reduce_max_ps(x.v);
}

inline I32 operator+(I32 a, I32 b) {
    return {_mm512_add_epi32(a.v, b.v)};
}
inline I32 operator-(I32 a, I32 b) {
    return {_mm512_sub_epi32(a.v, b.v)};
}
inline I32 operator&(I32 a, I32 b) {
    return {_mm512_and_si512(a.v, b.v)};
}
inline I32 operator|(I32 a, I32 b) {
    return {_mm512_or_si512(a.v, b.v)};
}
inline I32 operator^(I32 a, I32 b) {
    return {_mm512_xor_si512(a.v, b.v)};
}
inline I32 max(I32 a, I32 b) {
    return {_mm512_max_epi32(a.v, b.v)};
}
inline std::int32_t reduce_max(I32 x) {
    return _mm512_reduce_max_epi32(x.v);
}
inline I32 shift_left(I32 x, int n) {
    return {_mm512_sll_epi32(x.v, _mm_cvtsi32_si128(n))};
}
inline I32 shift_right(I32 x, int n) {
    return {_mm512_srl_epi32(x.v, _mm_cvtsi32_si128(n))};
}

// All ones where a < b.
inline I32 less(F32 a, F32 b) {
    return {_mm512_movm_epi32(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ))};
}
inline I32 less(I32 a, I32 b) {
    return {_mm512_movm_epi32(_mm512_cmplt_epi32_mask(a.v, b.v))};
}

inline I32 as_int(F32 x) {
    return {_mm512_castps_si512(x.v)};
}
inline F32 as_float(I32 x) {
    return {_mm512_castsi512_ps(x.v)};
}
inline F32 to_float(I32 x) {
    return {_mm512_cvtepi32_ps(x.v)};
}
// For 0 <= x < 2**22.
inline I32 round_to_even(F32 x) {
    return {_mm512_cvtps_epi32(x.v)};
}
inline I32 truncate(F32 x) {
    return {_mm512_cvttps_epi32(x.v)};
}

// A table of up to 16 entries, in registers.
class SmallTable {
  public:
    explicit SmallTable(const float* entries) : entries_(_mm512_loadu_ps(entries)) {}
    F32 operator[](I32 index) const { return {_mm512_permutexvar_ps(index.v, entries_)}; }

  private:
    __m512 entries_;
};

// A table of up to 128 entries, in registers: on some CPUs these are much faster than gathering from memory.
class LargeTable {
  public:
    explicit LargeTable(const float* entries) {
        for (int k = 0; k < 8; ++k) entries_[k] = _mm512_loadu_ps(entries + 16 * k);
    }
    F32 operator[](I32 index) const {
        const __mmask16 bit5 = _mm512_test_epi32_mask(index.v, _mm512_set1_epi32(32));
        const __mmask16 bit6 = _mm512_test_epi32_mask(index.v, _mm512_set1_epi32(64));
        const __m512 low = _mm512_mask_blend_ps(bit5, of_32(0, index), of_32(2, index));
        const __m512 high = _mm512_mask_blend_ps(bit5, of_32(4, index), of_32(6, index));
        return {_mm512_mask_blend_ps(bit6, low, high)};
    }

  private:
    __m512 of_32(int k, I32 index) const {
        return _mm512_permutex2var_ps(entries_[k], index.v, entries_[k + 1]);
    }

    __m512 entries_[8];
};

// Unsigned integers of any width; a store keeps the low bits of each lane.
inline I32 load_widen(const std::uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I32 load_widen(const std::uint16_t* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline I32 load_widen(const std::uint32_t* p) {
    return {_mm512_loadu_si512(p)};
}
inline void store_narrow(std::uint8_t* p, I32 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
inline void store_narrow(std::uint16_t* p, I32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}
inline void store_narrow(std::uint32_t* p, I32 x) {
    _mm512_storeu_si512(p, x.v);
}

// Half precision in the low 16 bits of each lane.
inline F32 from_half(I32 half) {
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half.v))};
}
inline I32 to_half(F32 x) {
    return {_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
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

// Sums of squares in double precision, one per lane. The square of a float is exact there, so that fusing it
// with the sum changes nothing.
class SquareSums {
  public:
    void add(F32 x) {
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
        const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
        low_ = _mm512_fmadd_pd(low, low, low_);
        high_ = _mm512_fmadd_pd(high, high, high_);
    }
    void store(double (&lanes)[16]) const {
        _mm512_storeu_pd(lanes, low_);
        _mm512_storeu_pd(lanes + 8, high_);
    }

  private:
    __m512d low_ = _mm512_setzero_pd();
    __m512d high_ = _mm512_setzero_pd();
};

// a * b + c, rounded once or twice: not for what all bodies must agree on.
inline F32 multiply_add(F32 a, F32 b, F32 c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}

// How many F32 the registers hold.
inline constexpr int register_count = 32;

// 32-bit words in the low halves of 64-bit lanes. What lies in the high halves never matters.
struct Words {
    static constexpr int lanes = 8;
    // The lane order for which store_quads writes in sequence.
    static constexpr std::uint64_t order[lanes] = {0, 4, 1, 5, 2, 6, 3, 7};
    __m512i v;
};

inline Words splat_words(std::uint32_t x) {
    return {_mm512_set1_epi64(static_cast<std::int64_t>(x))};
}
inline Words load_words(const std::uint64_t* p) {
    return {_mm512_loadu_si512(p)};
}
inline Words operator+(Words a, Words b) {
    return {_mm512_add_epi32(a.v, b.v)};
}
inline Words operator^(Words a, Words b) {
    return {_mm512_xor_si512(a.v, b.v)};
}
// Low and high word of the 64-bit product.
inline Words multiply(Words a, Words b) {
    return {_mm512_mul_epu32(a.v, b.v)};
}
inline Words high_word(Words product) {
    return {_mm512_srli_epi64(product.v, 32)};
}

// Write the four words of each lane side by side, the lanes in sequence.
inline void store_quads(std::uint16_t* p, Words w0, Words w1, Words w2, Words w3) {
    const __m512i low = _mm512_mask_blend_epi32(0xAAAA, w0.v, _mm512_slli_epi64(w1.v, 32));
    const __m512i high = _mm512_mask_blend_epi32(0xAAAA, w2.v, _mm512_slli_epi64(w3.v, 32));
    _mm512_storeu_si512(p, _mm512_unpacklo_epi64(low, high));
    _mm512_storeu_si512(p + 32, _mm512_unpackhi_epi64(low, high));
}

}  // namespace gradcomp::GRADCOMP_BODY
