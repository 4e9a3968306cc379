// Whether a gradient holds anything at all; it stops at the first block that does.

#include <algorithm>
#include <cstring>

#include "kernels.hpp"

namespace gradcomp {

namespace {

// Everything but the sign bits: -0 is zero, NaN is not.
std::uint64_t magnitude_mask(Dtype dtype) {
    switch (dtype) {
        case Dtype::float32:
            return 0x7FFFFFFF7FFFFFFF;
        case Dtype::float64:
            return 0x7FFFFFFFFFFFFFFF;
        default:
            return 0x7FFF7FFF7FFF7FFF;
    }
}

std::int64_t element_bytes(Dtype dtype) {
    switch (dtype) {
        case Dtype::float32:
            return 4;
        case Dtype::float64:
            return 8;
        default:
            return 2;
    }
}

}  // namespace

bool any_nonzero(const Segment& segment) {
    if (segment.gradient == 0) return false;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(segment.gradient);
    const std::int64_t size = segment.length * element_bytes(segment.dtype);
    const std::uint64_t mask = magnitude_mask(segment.dtype);

    constexpr std::int64_t block_words = 512;
    for (std::int64_t at = 0; at < size;) {
        std::uint64_t words[block_words];
        const std::int64_t count = std::min<std::int64_t>(size - at, sizeof(words));
        const std::int64_t word_count = (count + 7) / 8;
        words[word_count - 1] = 0;
        std::memcpy(words, bytes + at, static_cast<std::size_t>(count));
        std::uint64_t any = 0;
        for (std::int64_t i = 0; i < word_count; ++i) any |= words[i];
        if (any & mask) return true;
        at += count;
    }
    return false;
}

}  // namespace gradcomp
