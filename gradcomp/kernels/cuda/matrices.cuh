// Layers as matrices, row by row in memory, and how the threads of a block share one; see lowrank.py.
#pragma once

#include "common.cuh"

namespace gradcomp::cuda {

inline constexpr int warps = 8;
inline constexpr std::int64_t chunk_columns = 1024;  // of a tile

// What a matrix has beside its segment.
struct Layer {
    std::int64_t index;  // of the row of the whole table
    std::int64_t rows, columns, rank;
    std::int64_t p_at, q_at;  // elements
    std::int64_t lanes;       // of a warp that lie side by side along a row; a power of two
    std::int64_t chunks;      // of columns or rows, for each of which there is a sum
    std::int64_t parts_at;    // the first of their sums
};

inline int lane_of_warp() {
    return static_cast<int>(threadIdx.x % 32);
}

// Some elements, of which `count` exist; zeros stand for the others. `wide`: all do, and lie as a vector
// does.
template <bool wide>
inline void read_vector(const float* p, std::int64_t count, float (&x)[4]) {
    if constexpr (wide) {
        const float4 all = *reinterpret_cast<const float4*>(p);
        x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = j < count ? p[j] : 0.0f;
    }
}

template <bool wide>
inline void read_vector(const float* p, std::int64_t count, float (&x)[2]) {
    if constexpr (wide) {
        const float2 both = *reinterpret_cast<const float2*>(p);
        x[0] = both.x, x[1] = both.y;
    } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) x[j] = j < count ? p[j] : 0.0f;
    }
}

template <bool wide>
inline void read_vector(const std::uint16_t* p, std::int64_t count, std::uint16_t (&x)[4]) {
    if constexpr (wide) {
        const uint2 all = *reinterpret_cast<const uint2*>(p);
        x[0] = static_cast<std::uint16_t>(all.x), x[1] = static_cast<std::uint16_t>(all.x >> 16);
        x[2] = static_cast<std::uint16_t>(all.y), x[3] = static_cast<std::uint16_t>(all.y >> 16);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = j < count ? p[j] : static_cast<std::uint16_t>(0);
    }
}

// See write_floats.
template <bool wide>
inline void write_vector(float* p, std::int64_t count, const float (&x)[4]) {
    if constexpr (wide) {
        __stcs(reinterpret_cast<float4*>(p), make_float4(x[0], x[1], x[2], x[3]));
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j < count) p[j] = x[j];
    }
}

template <bool wide>
inline void write_vector(std::uint16_t* p, std::int64_t count, const std::uint16_t (&x)[4]) {
    if constexpr (wide) {
        const uint2 all = make_uint2(x[0] | static_cast<std::uint32_t>(x[1]) << 16,
                                     x[2] | static_cast<std::uint32_t>(x[3]) << 16);
        __stcs(reinterpret_cast<uint2*>(p), all);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j < count) p[j] = x[j];
    }
}

// Whether all rows of a matrix begin where a vector of four elements may.
inline bool rows_are_wide(std::uint64_t address, std::int64_t columns, Dtype dtype = Dtype::float32) {
    return columns % 4 == 0 && address % (dtype == Dtype::float32 ? 16 : 8) == 0;
}

// The part of a matrix that a thread works on: some rows, one after another, and of their columns four at a
// time. The lanes of a warp lie along a row; where it has few columns, further rows take the other lanes.
template <int rows>
struct Tile {
    Layer layer;
    Segment segment;
    std::int64_t chunk;             // the number of the block's columns
    std::int64_t first, left;       // the thread's first row, and how many there are from it on
    std::int64_t begin, end, step;  // columns
    bool any;                       // whether the warp has a row

    Tile(std::uint64_t segments, std::uint64_t layers, std::uint64_t tiles, std::int64_t count) {
        const auto* begins = at<std::int64_t>(tiles);
        const std::int64_t row = row_of(begins, count, blockIdx.x);
        segment = at<Segment>(segments)[row];
        layer = at<Layer>(layers)[row];
        const std::int64_t tile = blockIdx.x - begins[row];
        chunk = tile % layer.chunks;
        const std::int64_t side = 32 / layer.lanes;
        const std::int64_t warp_first = (tile / layer.chunks * warps + threadIdx.x / 32) * side * rows;
        any = warp_first < layer.rows;
        first = warp_first + lane_of_warp() / layer.lanes * rows;
        left = layer.rows - first;
        begin = chunk * chunk_columns + 4 * (lane_of_warp() % layer.lanes);
        end = smaller(layer.columns, (chunk + 1) * chunk_columns);
        step = 4 * layer.lanes;
    }

    // The element of the thread's row i in column b; rows that do not exist are the last one.
    std::int64_t element(int i, std::int64_t b) const {
        return smaller(first + i, layer.rows - 1) * layer.columns + b;
    }
};

}  // namespace gradcomp::cuda
