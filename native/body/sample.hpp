// Which elements of a layer are looked at in a turn, and what they come to;
// gradcomp/kernels/reference_checksum.py defines it. CUDA compiles this too.
#pragma once

#include "../segment.hpp"

namespace gradcomp {

struct Sample {
    std::int64_t run, stride, blocks, turned;

    Sample(std::int64_t length, std::uint32_t turn) {
        run = length < 2 * 65536 ? 1 : length < 16 * 65536 ? length / 65536 : 16;
        stride = length < 2 * 256 ? 1 : length < 65536 ? length / 256 : 256;
        blocks = (length + stride * run - 1) / (stride * run);
        turned = turn % stride * 641 % stride;
    }

    // The first element of a block's run. A block takes no division, which would take longer than the rest.
    std::int64_t at(std::int64_t block) const {
        const std::uint32_t hash = static_cast<std::uint32_t>(block) * 0x9E3779B1u;
        const auto shift = static_cast<std::int64_t>(hash * static_cast<std::uint64_t>(stride) >> 32);
        const std::int64_t place = turned + shift;  // both are below the stride
        return (block * stride + (place < stride ? place : place - stride)) * run;
    }
};

// One to one in `bits`.
inline std::uint32_t mixed(std::uint32_t bits, std::int64_t position) {
    std::uint32_t x = bits ^ static_cast<std::uint32_t>(position) * 0x9E3779B1u;
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

// A block's run, whose elements have so many words each.
template <class Word, int words>
inline std::uint32_t sampled(const Word* values, std::int64_t length, const Sample& sample,
                             std::int64_t block) {
    const std::int64_t begin = words * sample.at(block);
    const std::int64_t stop = begin + words * sample.run, most = words * length;
    std::uint32_t sum = 0;
    for (std::int64_t i = begin; i < (stop < most ? stop : most); ++i) sum += mixed(values[i], i);
    return sum;
}

inline std::uint32_t sampled(const Segment& segment, const Sample& sample, std::int64_t block) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(segment.gradient);
    const auto* const halves = reinterpret_cast<const std::uint16_t*>(segment.gradient);
    switch (segment.dtype) {
        case Dtype::float32:
            return sampled<std::uint32_t, 1>(words, segment.length, sample, block);
        case Dtype::float64:
            return sampled<std::uint32_t, 2>(words, segment.length, sample, block);
        default:
            return sampled<std::uint16_t, 1>(halves, segment.length, sample, block);
    }
}

}  // namespace gradcomp
