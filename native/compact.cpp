// Payloads without what is left of their room; gradcomp/kernels/reference_bits.py defines both kernels.

#include <cstring>
#include <stdexcept>

#include "kernels.hpp"

namespace gradcomp {

namespace {

// Bytes that a row uses, of which so many are there at most.
std::int64_t used(Codec codec, const Segment& segment, const std::uint8_t* source, std::int64_t there) {
    const std::int64_t least = is_allocated(codec) ? scale_bytes(codec, segment) : wire_bytes(codec, segment);
    if (least > there) throw std::invalid_argument("the payloads end too early");
    const std::int64_t found = is_allocated(codec) ? used_bytes(segment, source) : least;
    if (found < 0) throw std::invalid_argument("the bits of the buckets are not possible");
    if (found > there) throw std::invalid_argument("the payloads end too early");
    return found;
}

}  // namespace

std::int64_t compact(Codec codec, const SegmentTable& table, const std::uint8_t* payload, std::uint8_t* out) {
    std::uint8_t* at = out;
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const Segment segment = table[row];
        const std::uint8_t* const source = payload + segment.payload;
        const std::int64_t bytes = used(codec, segment, source, wire_bytes(codec, segment));
        std::memcpy(at, source, static_cast<std::size_t>(bytes));
        at += bytes;
    }
    return at - out;
}

std::int64_t restore(Codec codec, const SegmentTable& table, const std::uint8_t* source, std::int64_t there,
                     std::uint8_t* payload) {
    std::int64_t at = 0;
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const Segment segment = table[row];
        const std::int64_t bytes = used(codec, segment, source + at, there - at);
        std::uint8_t* const target = payload + segment.payload;
        std::memcpy(target, source + at, static_cast<std::size_t>(bytes));
        std::memset(target + bytes, 0, static_cast<std::size_t>(wire_bytes(codec, segment) - bytes));
        at += bytes;
    }
    return at;
}

}  // namespace gradcomp
