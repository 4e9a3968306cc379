// Sixteen lanes in two AVX2 registers (with F16C and FMA).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace gradcomp::GRADCOMP_BODY {

struct F32 {
    __m256 low, high;
};
struct I32 {
    __m256i low, high;
};

inline F32 splat(float x) {
    return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline I32 splat(std::int32_t x) {
    return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}

inline F32 load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void store(float* p, F32 x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline void stream(float* p, F32 x) {
    _mm256_stream_ps(p, x.low);
    _mm256_stream_ps(p + 8, x.high);
}
inline void stream_fence() {
    _mm_sfence();
}
// The cache line at an address, which need not exist.
inline void prefetch(std::uintptr_t address) {
    _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
}

inline F32 operator+(F32 a, F32 b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline F32 operator-(F32 a, F32 b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline F32 operator*(F32 a, F32 b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline F32 operator/(F32 a, F32 b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline F32 min(F32 a, F32 b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline F32 max(F32 a, F32 b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

inline float reduce_min(F32 x) {
    const __m256 eight = _mm256_min_ps(x.low, x.high);
    const __m128 four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_add(F32 x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_max(F32 x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline I32 operator+(I32 a, I32 b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline I32 operator-(I32 a, I32 b) {
    return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
inline I32 operator&(I32 a, I32 b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
inline I32 operator|(I32 a, I32 b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
inline I32 operator^(I32 a, I32 b) {
    return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
inline I32 max(I32 a, I32 b) {
    return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
}
inline std::int32_t reduce_max(I32 x) {
    const __m256i eight = _mm256_max_epi32(x.low, x.high);
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
inline I32 shift_left(I32 x, int n) {
    const __m128i count = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi32(x.low, count), _mm256_sll_epi32(x.high, count)};
}
inline I32 shift_right(I32 x, int n) {
    const __m128i count = _mm_cvtsi32_si128(n);
    return {_mm256_srl_epi32(x.low, count), _mm256_srl_epi32(x.high, count)};
}

// All ones where a < b.
inline I32 less(F32 a, F32 b) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
inline I32 less(I32 a, I32 b) {
    return {_mm256_cmpgt_epi32(b.low, a.low), _mm256_cmpgt_epi32(b.high, a.high)};
}

inline I32 as_int(F32 x) {
    return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
inline F32 as_float(I32 x) {
    return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
inline F32 to_float(I32 x) {
    return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
// For 0 <= x < 2**22.
inline I32 round_to_even(F32 x) {
    return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
}
inline I32 truncate(F32 x) {
    return {_mm256_cvttps_epi32(x.low), _mm256_cvttps_epi32(x.high)};
}

// A table of up to 16 entries, in registers.
class SmallTable {
  public:
    explicit SmallTable(const float* entries)
        : low_(_mm256_loadu_ps(entries)), high_(_mm256_loadu_ps(entries + 8)) {}
    F32 operator[](I32 index) const { return {at(index.low), at(index.high)}; }

  private:
    __m256 at(__m256i index) const {
        const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low_, index), _mm256_permutevar8x32_ps(high_, index),
                                bit3);
    }

    __m256 low_, high_;
};

// A table of up to 128 entries, in memory.
class LargeTable {
  public:
    explicit LargeTable(const float* entries) : entries_(entries) {}
    F32 operator[](I32 index) const {
        return {_mm256_i32gather_ps(entries_, index.low, 4), _mm256_i32gather_ps(entries_, index.high, 4)};
    }

  private:
    const float* entries_;
};

// Unsigned integers of any width; a store keeps the low bits of each lane.
inline I32 load_widen(const std::uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
inline I32 load_widen(const std::uint16_t* p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline I32 load_widen(const std::uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
// Low halves of all lanes in sequence: packing works within 128-bit halves, so its order is put right.
inline __m256i narrow(I32 x) {
    const __m256i mask = _mm256_set1_epi32(0xFFFF);
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask));
    return _mm256_permute4x64_epi64(packed, 0xD8);
}
inline void store_narrow(std::uint8_t* p, I32 x) {
    const __m256i halves = _mm256_and_si256(narrow(x), _mm256_set1_epi16(0xFF));
    const __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline void store_narrow(std::uint16_t* p, I32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x));
}
inline void store_narrow(std::uint32_t* p, I32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.high);
}

// Half precision in the low 16 bits of each lane.
inline F32 from_half(I32 half) {
    const __m256i packed = narrow(half);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}
inline I32 to_half(F32 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.low, mode)),
            _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.high, mode))};
}

// Sums in double precision, one per lane.
class LaneSums {
  public:
    void add(F32 x) {
        add(0, _mm256_castps256_ps128(x.low));
        add(1, _mm256_extractf128_ps(x.low, 1));
        add(2, _mm256_castps256_ps128(x.high));
        add(3, _mm256_extractf128_ps(x.high, 1));
    }
    void store(double (&lanes)[16]) const {
        for (int k = 0; k < 4; ++k) _mm256_storeu_pd(lanes + 4 * k, sums_[k]);
    }

  private:
    void add(int k, __m128 x) { sums_[k] = _mm256_add_pd(sums_[k], _mm256_cvtps_pd(x)); }

    __m256d sums_[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
};

// Sums of squares in double precision, one per lane. The square of a float is exact there, so that fusing it
// with the sum changes nothing.
class SquareSums {
  public:
    void add(F32 x) {
        add(0, _mm256_castps256_ps128(x.low));
        add(1, _mm256_extractf128_ps(x.low, 1));
        add(2, _mm256_castps256_ps128(x.high));
        add(3, _mm256_extractf128_ps(x.high, 1));
    }
    void store(double (&lanes)[16]) const {
        for (int k = 0; k < 4; ++k) _mm256_storeu_pd(lanes + 4 * k, sums_[k]);
    }

  private:
    void add(int k, __m128 x) {
        const __m256d wide = _mm256_cvtps_pd(x);
        sums_[k] = _mm256_fmadd_pd(wide, wide, sums_[k]);
    }

    __m256d sums_[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
};

// a * b + c, rounded once or twice: not for what all bodies must agree on.
inline F32 multiply_add(F32 a, F32 b, F32 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

// How many F32 the registers hold.
inline constexpr int register_count = 8;

// 32-bit words in the low halves of 64-bit lanes. What lies in the high halves never matters.
struct Words {
    static constexpr int lanes = 4;
    // The lane order for which store_quads writes in sequence.
    static constexpr std::uint64_t order[lanes] = {0, 2, 1, 3};
    __m256i v;
};

inline Words splat_words(std::uint32_t x) {
    return {_mm256_set1_epi64x(static_cast<std::int64_t>(x))};
}
inline Words load_words(const std::uint64_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline Words operator+(Words a, Words b) {
    return {_mm256_add_epi32(a.v, b.v)};
}
inline Words operator^(Words a, Words b) {
    return {_mm256_xor_si256(a.v, b.v)};
}
// Low and high word of the 64-bit product.
inline Words multiply(Words a, Words b) {
    return {_mm256_mul_epu32(a.v, b.v)};
}
inline Words high_word(Words product) {
    return {_mm256_srli_epi64(product.v, 32)};
}

// Write the four words of each lane side by side, the lanes in sequence.
inline void store_quads(std::uint16_t* p, Words w0, Words w1, Words w2, Words w3) {
    const __m256i low = _mm256_blend_epi32(w0.v, _mm256_slli_epi64(w1.v, 32), 0xAA);
    const __m256i high = _mm256_blend_epi32(w2.v, _mm256_slli_epi64(w3.v, 32), 0xAA);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_unpacklo_epi64(low, high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), _mm256_unpackhi_epi64(low, high));
}

}  // namespace gradcomp::GRADCOMP_BODY
