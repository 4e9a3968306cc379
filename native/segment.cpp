#include "segment.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace gradcomp {

namespace {

void require(bool condition, std::int64_t row, const std::string& complaint) {
    if (!condition) throw std::invalid_argument("segment " + std::to_string(row) + ": " + complaint);
}

bool quantises(Codec codec) {
    return codec == Codec::minmax || codec == Codec::l2 || codec == Codec::linf;
}

int code_bits(Codec codec, const Segment& segment) {
    switch (codec) {
        case Codec::fp32:
            return 32;
        case Codec::fp64:
            return 64;
        case Codec::fp16:
        case Codec::bf16:
            return 16;
        default:
            return segment.bits;
    }
}

}  // namespace

int scale_record_bytes(Codec codec) {
    switch (codec) {
        case Codec::minmax:
            return 8;
        case Codec::l2:
        case Codec::linf:
        case Codec::fp16:
            return 4;
        default:
            return 0;
    }
}

std::int64_t scale_bytes(Codec codec, const Segment& segment) {
    const std::int64_t buckets = (segment.length + segment.bucket_size - 1) / segment.bucket_size;
    return buckets * scale_record_bytes(codec);
}

std::int64_t wire_bytes(Codec codec, const Segment& segment) {
    return scale_bytes(codec, segment) + (segment.length * code_bits(codec, segment) + 7) / 8;
}

Segment SegmentTable::operator[](std::int64_t row) const {
    Segment segment;
    std::memcpy(&segment, rows_ + row * std::int64_t{sizeof(Segment)}, sizeof(Segment));
    return segment;
}

void check_elements(std::int64_t row, const Segment& segment) {
    require(segment.dtype >= Dtype::float32 && segment.dtype <= Dtype::float64, row, "unknown dtype");
    require(segment.length >= 0 && segment.length <= max_elements && segment.start >= 0 &&
                segment.start <= max_elements - segment.length,
            row, "elements start..start+length are not in 0.." + std::to_string(max_elements));
}

void check_segment(Codec codec, std::int64_t row, const Segment& segment, std::int64_t payload_size) {
    check_elements(row, segment);
    require(segment.bucket_size >= 1, row, "bucket_size is not positive");
    require((segment.dtype == Dtype::float64) == (codec == Codec::fp64), row,
            "dtype float64 goes with codec FP64, and FP64 with nothing else");
    require(!quantises(codec) || (segment.bits >= 1 && segment.bits <= 8), row, "bits is not in 1..8");
    // Written as a difference: the sum of a hostile offset and a size could wrap.
    require(segment.payload >= 0 && segment.payload <= payload_size - wire_bytes(codec, segment), row,
            "the segment does not lie inside the payload of " + std::to_string(payload_size) + " bytes");
}

Codec check_codec(int number) {
    if (number < 0 || number > static_cast<int>(Codec::fp64))
        throw std::invalid_argument("unknown codec " + std::to_string(number));
    return static_cast<Codec>(number);
}

}  // namespace gradcomp
