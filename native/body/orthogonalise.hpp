// Gram-Schmidt with a fixed order: every body gives the same bytes.
#pragma once

#include "gram_schmidt.hpp"
#include "lowrank.hpp"
#include "sums.hpp"

namespace gradcomp::GRADCOMP_BODY {

// As Doubles8.
using Floats8 = float __attribute__((vector_size(32)));

// x . y of at most a chunk, in double precision; products of floats are exact there.
inline double dot_of_chunk(const float* x, const float* y, std::int64_t n) {
    Doubles8 sums[2] = {};
    const auto add = [&](const float* a, const float* b) {
        for (int half = 0; half < 2; ++half) {
            Floats8 u, v;
            std::memcpy(&u, a + 8 * half, sizeof u);
            std::memcpy(&v, b + 8 * half, sizeof v);
            sums[half] += __builtin_convertvector(u, Doubles8) * __builtin_convertvector(v, Doubles8);
        }
    };
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) add(x + i, y + i);
    if (i < n) {
        float rest[2][lanes] = {};
        copy_floats(rest[0], x + i, n - i);
        copy_floats(rest[1], y + i, n - i);
        add(rest[0], rest[1]);
    }
    double lane[lanes];
    std::memcpy(lane, sums, sizeof lane);
    return lane_tree(lane);
}

// x . y
inline double dot(const float* x, const float* y, std::int64_t n) {
    ChunkTree tree;
    for (std::int64_t begin = 0; begin < n; begin += chunk_elements)
        tree.add(dot_of_chunk(x + begin, y + begin, smaller(chunk_elements, n - begin)));
    return tree.total();
}

// x <- x - factor * y
inline void remove(float* x, float factor, const float* y, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(x + i, load(x + i) - splat(factor) * load(y + i));
    for (; i < n; ++i) {
        const float rest = value_at(x + i) - factor * value_at(y + i);
        std::memcpy(x + i, &rest, sizeof rest);
    }
}

// x <- factor * x
inline void multiply(float* x, double factor, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
        const float product = scaled(value_at(x + i), factor);
        std::memcpy(x + i, &product, sizeof product);
    }
}

// Magnitudes compare as their bits do, NaN above all.
inline std::uint32_t largest_magnitude(const float* x, std::int64_t n) {
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

inline void orthogonalise_columns(float* p, std::int64_t n, std::int64_t rank) {
    if (n == 0) return;
    if (largest_magnitude(p, n * rank) >= 0x7F800000) {
        const float nan = __builtin_nanf("");
        for (std::int64_t i = 0; i < n * rank; ++i) std::memcpy(p + i, &nan, sizeof nan);
        return;
    }
    for (std::int64_t k = 0; k < rank; ++k) {
        float* const x = p + k * n;
        const std::uint32_t largest = largest_magnitude(x, n);
        if (largest != 0) multiply(x, normalising_power(largest), n);
        const double before = __builtin_sqrt(dot(x, x, n));
        for (int pass = 0; pass < 2; ++pass)
            for (std::int64_t j = 0; j < k; ++j)
                remove(x, static_cast<float>(dot(p + j * n, x, n)), p + j * n, n);
        const double norm = __builtin_sqrt(dot(x, x, n));
        if (norm > dependent * before)
            multiply(x, 1.0 / norm, n);
        else
            clear_floats(x, n);
    }
}

}  // namespace gradcomp::GRADCOMP_BODY
