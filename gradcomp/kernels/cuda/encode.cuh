// What the kernels of encode.cu and ranges.cu have in common, for one codec: GRADCOMP_CLASS.
#pragma once

#include "native/body/block_float.hpp"
#include "native/body/casts.hpp"
#include "native/body/codebook.hpp"
#include "native/body/signs.hpp"

#include "philox.cuh"
#include "sources.cuh"

namespace gradcomp::cuda {

using Class = GRADCOMP_CLASS;

struct EncodeParams {
    std::uint64_t rows, places;  // see Place
    std::int64_t tiles;
    std::uint64_t payload;       // written
    std::uint64_t bad;           // a byte per row: something is not finite
    std::uint64_t codecs;        // of all buckets; ranges.cu writes them, codes read them
    std::uint64_t codec_begins;  // number of the first bucket of each row
    std::uint64_t parts;         // of all buckets: what blocks have found in each
    std::uint64_t part_begins;   // number of the first part of each row
    std::uint64_t payloads;      // addresses, of reduce
    std::int64_t payload_count;
    std::uint64_t magnitudes;
    std::uint64_t largest;  // magnitude of each row's contributions, where scales have a unit
    std::uint64_t seed;
    std::int64_t step, rank;
    double scale, decay, divisor;
};

inline Stream stream_of(const EncodeParams& params) {
    return {params.seed, static_cast<std::uint32_t>(params.step), static_cast<std::uint32_t>(params.rank)};
}

// Whether a range comes out the same in whatever order elements are added.
template <class Range>
inline constexpr bool order_free = false;
template <>
inline constexpr bool order_free<MinMax::Range> = true;
template <>
inline constexpr bool order_free<LInfNorm> = true;
template <>
inline constexpr bool order_free<Presence> = true;

inline constexpr int teams = 256 / team_threads;

// The size that codes.py reserves, _KEPT_BYTES.
static_assert(sizeof(Class) <= 64);

// A bucket of a row, and the team that works on it. The two teams of a warp take neighbours and stay
// together: the first one's bucket is no shorter than the second one's, which may have none.
struct Job {
    std::uint32_t row;
    const Segment& segment;  // in global memory: a copy would take registers
    Payload<Class> layout;
    std::int64_t bucket, begin;
    std::int64_t elements;  // of the bucket, zero if there is none
    std::int64_t most;      // of the warp's first bucket
    std::int64_t least;     // of its second one

    Job(const EncodeParams& params, const Place& place)
        : row(place.row), segment(at<Segment>(params.rows)[place.row]), layout(segment) {
        const auto team = static_cast<int>(threadIdx.x) / team_threads, second = team % 2;
        const std::int64_t size = layout.bucket_size;
        bucket = std::int64_t{place.tile} * teams + team;
        begin = bucket * size;
        const std::int64_t left = segment.length - begin;
        elements = not_negative(smaller(size, left));
        most = smaller(size, left + second * size);
        least = not_negative(smaller(size, left - (1 - second) * size));
    }

    std::uint8_t* payload(const EncodeParams& params) const {
        return to<std::uint8_t>(params.payload) + segment.payload;
    }

    // Bits and magnitudes of the row, the unit of its scales and the shift of its lattice.
    Level level(const EncodeParams& params) const {
        Level level = level_of<Class>(segment, at<float>(params.magnitudes), at<float>(params.largest) + row);
        if constexpr (shifts<Class>) level.shift = shift_of(stream_of(params), segment.layer);
        return level;
    }

    // By one thread of each team: the record of the bucket, and whether it is sound.
    void write(const EncodeParams& params, const Class& codec) const {
        if (team_rank() != 0 || elements <= 0) return;
        if (!codec.representable()) to<std::uint8_t>(params.bad)[row] = 1;
        if constexpr (unit_bytes<Class> > 0)
            if (bucket == 0) write_float(payload(params), level(params).unit);
        codec.write(payload(params) + place_of_record<Class>(bucket));
    }
};

}  // namespace gradcomp::cuda
