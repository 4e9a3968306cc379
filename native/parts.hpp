// A call divided into parts that threads may handle in any order: rows of its table, and runs of elements of
// long rows.
//
// Draws depend on layer and element, ranges on the bucket, and parts begin where a bucket and a byte of codes
// begins, so that results do not depend on how a call is divided. NVFP4 encodes a segment as a whole, because
// all of its scales are multiples of a unit that depends on all elements; so do codecs whose buckets have
// bits of their own, and they decode it as a whole too, because codes lie behind those of all buckets before.
#pragma once

#include "kernels.hpp"

namespace gradcomp {

// A part as a segment of its own, whose payload is still that of the row, and where its scale records and its
// codes begin in the buffer of a payload.
struct Piece {
    Segment segment;
    std::int64_t scales, codes;
};

Piece piece_of(Codec codec, const SegmentTable& table, const Part& part);

// The kernels of the body in use, on as many threads as the work is worth.
void encode(const EncodeCall& call);
void decode(const DecodeCall& call);
void decode_add(const DecodeAddCall& call);
void reduce(const ReduceCall& call);

}  // namespace gradcomp
