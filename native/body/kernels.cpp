// The kernels of one instruction set; compiled once for each, see CMakeLists.txt.

#include "../kernels.hpp"

#include "allocated.hpp"
#include "block_float.hpp"
#include "casts.hpp"
#include "codebook.hpp"
#include "decode.hpp"
#include "draw.hpp"
#include "encode.hpp"
#include "fp64.hpp"
#include "lowrank.hpp"
#include "orthogonalise.hpp"
#include "program.hpp"
#include "project.hpp"
#include "scatter.hpp"
#include "select.hpp"
#include "select_sums.hpp"
#include "signs.hpp"
#include "sources.hpp"

#define GRADCOMP_STRING(name) #name
#define GRADCOMP_NAME_OF(name) GRADCOMP_STRING(name)

namespace gradcomp::GRADCOMP_BODY {

namespace {

// Call f<Class>() with the class of a codec at a level; FP64 has none.
template <class Function>
bool with_codec(Codec codec, int bits, Function f) {
    switch (codec) {
        case Codec::minmax:
        case Codec::minmax_shift:
            return f.template operator()<MinMax>();
        case Codec::l2:
            return bits == 1 ? f.template operator()<PureSign<L2Norm>>()
                             : f.template operator()<SignMagnitude<L2Norm>>();
        case Codec::linf:
            return bits == 1 ? f.template operator()<PureSign<LInfNorm>>()
                             : f.template operator()<SignMagnitude<LInfNorm>>();
        case Codec::fp16:
            return f.template operator()<ScaledHalf>();
        case Codec::bf16:
            return f.template operator()<Bfloat16>();
        case Codec::sign:
            return f.template operator()<Sign<MeanMagnitude>>();
        case Codec::vote:
            return f.template operator()<Sign<Presence>>();
        case Codec::onebit:
            return f.template operator()<OneBit>();
        case Codec::codebook_l2:
            return 1 << bits <= 2 * small_table_entries
                       ? f.template operator()<Codebook<L2Norm, SmallTable>>()
                       : f.template operator()<Codebook<L2Norm, LargeTable>>();
        case Codec::codebook_linf:
            return 1 << bits <= 2 * small_table_entries
                       ? f.template operator()<Codebook<LInfNorm, SmallTable>>()
                       : f.template operator()<Codebook<LInfNorm, LargeTable>>();
        case Codec::codebook_minmax:
            return 1 << bits <= small_table_entries ? f.template operator()<MinMaxCodebook<SmallTable>>()
                                                    : f.template operator()<MinMaxCodebook<LargeTable>>();
        case Codec::e4m3:
            return f.template operator()<BlockFloat<E4M3>>();
        case Codec::e5m2:
            return f.template operator()<BlockFloat<E5M2>>();
        case Codec::e2m1:
            return f.template operator()<BlockFloat<E2M1>>();
        case Codec::nvfp4:
            return f.template operator()<BlockFloatInUnits<E2M1>>();
        default:
            return f.template operator()<Float32>();
    }
}

// The class that encodes where Class decodes: one bit has scales of its own when it is rounded to nearest.
template <class Class>
struct OneBitToNearest {
    using Type = Class;
};
template <>
struct OneBitToNearest<MinMax> {
    using Type = TwoMeans;
};
template <class Norm>
struct OneBitToNearest<PureSign<Norm>> {
    using Type = Sign<MeanMagnitude>;
};

// `payload` begins with the unit, if there is one, and the first scale record; codes begin so many bytes
// later.
template <class Class>
bool encode_from(const Segment& segment, Level level, const Source& source, const Rounding& rounding,
                 std::int64_t scale_bytes, std::uint8_t* payload) {
    if constexpr (unit_bytes<Class> > 0) {
        if (segment.length == 0) return true;
        level.unit = Class::unit_for(largest_magnitude(source, segment.length));
        if (!is_finite(level.unit)) return false;
        write_float(payload, level.unit);
    }
    const EncodeJob job{segment,
                        source,
                        rounding,
                        level,
                        payload + unit_bytes<Class>,
                        payload + scale_bytes,
                        segment.length >= streaming_length};
    if constexpr (Class::draws) {
        if (rounding.stochastic) return SegmentEncoder<Class, true>(job).run();
    }
    if (level.bits == 1) return SegmentEncoder<typename OneBitToNearest<Class>::Type, false>(job).run();
    return SegmentEncoder<Class, false>(job).run();
}

// MinMax on a lattice that a draw moves; apart from encode_from, which is inlined for each codec.
[[gnu::noinline]] bool encode_shifted(const Piece& piece, const Source& source, const Rounding& rounding,
                                      std::uint8_t* payload) {
    const Segment& segment = piece.segment;
    Level level(segment, nullptr);
    level.shift = shift_of(rounding, segment.layer);
    const EncodeJob job{segment,
                        source,
                        rounding,
                        level,
                        payload + piece.scales,
                        payload + piece.codes,
                        segment.length >= streaming_length};
    return SegmentEncoder<ShiftedMinMax, false>(job).run();
}

// Whether encode_shifted encodes; without a draw, this codec is MinMax.
bool is_shifted(Codec codec, const Rounding& rounding) {
    return codec == Codec::minmax_shift && rounding.stochastic;
}

// Encode a part; returns whether it is finite.
bool encode_piece(const EncodeCall& call, const Piece& piece) {
    const Segment& segment = piece.segment;
    if (call.codec == Codec::fp64)
        return encode_fp64(segment, call.scale, call.decay, call.payload + piece.codes);
    const Gradient source(segment, static_cast<float>(call.scale), static_cast<float>(call.decay));
    if (is_allocated(call.codec))
        return encode_allocated(call.codec, segment, source, call.rounding, call.payload + segment.payload);
    if (is_shifted(call.codec, call.rounding))
        return encode_shifted(piece, source, call.rounding, call.payload);
    return with_codec(call.codec, segment.bits, [&]<class Class>() {
        const std::int64_t begin = piece.scales - unit_bytes<Class>;
        return encode_from<Class>(segment, Level(segment, call.magnitudes), source, call.rounding,
                                  piece.codes - begin, call.payload + begin);
    });
}

void encode(const EncodeCall& call, std::span<Part> parts) {
    for (Part& part : parts) part.failed = !encode_piece(call, piece_of(call.codec, call.table, part));
    stream_fence();
}

// Encode a part of the mean; returns whether it is finite.
bool reduce_piece(const ReduceCall& call, const Piece& piece) {
    const auto divisor = static_cast<float>(call.divisor), decay = static_cast<float>(call.decay);
    // It stays: memory that is new to the process is slow.
    thread_local std::vector<float> kept;
    const Segment& segment = piece.segment;
    if (call.codec == Codec::fp64)
        return reduce_fp64(segment, call.payloads, piece.codes, call.divisor, call.decay, call.out);
    if (is_allocated(call.codec)) {
        const MeanOfAllocated source(segment, call.payloads, divisor, decay);
        return encode_allocated(call.codec, segment, Kept(source, segment.length, kept), call.rounding,
                                call.out + segment.payload);
    }
    if (is_shifted(call.codec, call.rounding)) {
        const Mean<MinMax> source(piece, Level(segment, nullptr), call.payloads, divisor, decay);
        return encode_shifted(piece, source, call.rounding, call.out);
    }
    return with_codec(call.codec, segment.bits, [&]<class Class>() {
        const Level level(segment, call.magnitudes);
        const Mean<Class> source(piece, level, call.payloads, divisor, decay);
        const std::int64_t begin = piece.scales - unit_bytes<Class>;
        const std::int64_t scale_bytes = piece.codes - begin;
        if constexpr (unit_bytes<Class> > 0)
            return encode_from<Class>(segment, level, Kept(source, segment.length, kept), call.rounding,
                                      scale_bytes, call.out + begin);
        else
            return encode_from<Class>(segment, level, source, call.rounding, scale_bytes, call.out + begin);
    });
}

void reduce(const ReduceCall& call, std::span<Part> parts) {
    for (Part& part : parts) part.failed = !reduce_piece(call, piece_of(call.codec, call.table, part));
    stream_fence();
}

template <class Element>
void fill(void* out, std::int64_t count, Element value) {
    for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(static_cast<std::uint8_t*>(out) + i * std::int64_t{sizeof value}, &value, sizeof value);
}

void fill_with_nan(const Segment& segment) {
    auto* const out = reinterpret_cast<std::uint8_t*>(segment.output);
    switch (segment.dtype) {
        case Dtype::float32:
            return fill(out, segment.length, std::uint32_t{0x7FC00000});
        case Dtype::float16:
            return fill(out, segment.length, std::uint16_t{0x7E00});
        case Dtype::bfloat16:
            return fill(out, segment.length, std::uint16_t{0x7FC0});
        case Dtype::float64:
            return fill(out, segment.length, std::uint64_t{0x7FF8000000000000});
    }
}

// Decode to the output, or add to it; returns whether something is not finite there.
bool decode_piece(Codec codec, const Piece& piece, const float* magnitudes, const std::uint8_t* payload,
                  double divisor, double scale, bool added) {
    const Segment& segment = piece.segment;
    if (codec == Codec::fp64) return !decode_fp64(segment, payload + piece.codes, divisor, scale);
    const Finish finish{static_cast<float>(divisor), static_cast<float>(scale)};
    if (is_allocated(codec)) return decode_allocated(segment, payload + segment.payload, finish, added);
    return with_codec(codec, segment.bits, [&]<class Class>() {
        const PayloadView view =
            view_of<Class>(segment, Level(segment, magnitudes), payload, piece.scales, piece.codes);
        return decode_segment<Class>(segment, view, finish, added);
    });
}

void decode(const DecodeCall& call, std::span<Part> parts) {
    for (Part& part : parts) {
        const Piece piece = piece_of(call.codec, call.table, part);
        if (call.flags[part.row] != 0)
            fill_with_nan(piece.segment);
        else
            part.failed = decode_piece(call.codec, piece, call.magnitudes, call.payload, call.divisor,
                                       call.scale, false);
    }
    stream_fence();
}

void decode_add(const DecodeAddCall& call, std::span<Part> parts) {
    for (const Part& part : parts)
        decode_piece(call.codec, piece_of(call.codec, call.table, part), call.magnitudes, call.payload, 1.0,
                     call.scale, true);
}

void scatter_mean(const ScatterCall& call, ListPart* parts) {
    const Finish finish{static_cast<float>(call.divisor), static_cast<float>(call.scale)};
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        if (segment.output == 0) continue;
        if (call.flags[row] != 0) {
            fill_with_nan(segment);
            continue;
        }
        Lists lists(call, row, parts);
        if (scatter_segment(segment, lists, finish)) call.flags[row] |= 1;
    }
    stream_fence();
}

void project(const ProjectCall& call) {
    const LowRankLayers& layers = call.layers;
    for (std::int64_t row = 0; row < layers.table.size(); ++row) {
        const Segment segment = layers.table[row];
        const Matrix matrix = layers.matrix(row);
        const float factor = value_at(call.factors + row);
        float* const p = call.p + layers.p_at[row];
        if (!project_matrix(segment, matrix, factor, static_cast<float>(call.decay),
                            call.q + layers.q_at[row], p, layers.scratch)) {
            fill(p, matrix.rows * matrix.rank, std::uint32_t{0x7FC00000});
            call.flags[row] |= 1;
        }
    }
    stream_fence();
}

void back_project(const BackProjectCall& call) {
    const LowRankLayers& layers = call.layers;
    for (std::int64_t row = 0; row < layers.table.size(); ++row)
        back_project_matrix(layers.table[row], layers.matrix(row), call.p + layers.p_at[row],
                            call.q + layers.q_at[row], layers.scratch);
}

void orthogonalise(const OrthogonaliseCall& call) {
    for (std::int64_t row = 0; row < call.layers; ++row)
        orthogonalise_columns(call.p + call.p_at[row], call.rows[row], call.ranks[row]);
}

void expand(const ExpandCall& call) {
    const LowRankLayers& layers = call.layers;
    const Finish finish{static_cast<float>(call.divisor), static_cast<float>(call.scale)};
    for (std::int64_t row = 0; row < layers.table.size(); ++row) {
        const Segment segment = layers.table[row];
        if (segment.output == 0) continue;
        if (call.flags[row] != 0)
            fill_with_nan(segment);
        else if (!expand_matrix(segment, layers.matrix(row), call.p + layers.p_at[row],
                                call.q + layers.q_at[row], finish, layers.scratch))
            call.flags[row] |= 1;
    }
    stream_fence();
}

void subtract(const SubtractCall& call) {
    const LowRankLayers& layers = call.layers;
    for (std::int64_t row = 0; row < layers.table.size(); ++row)
        subtract_matrix(layers.table[row], layers.matrix(row), call.p + layers.p_at[row],
                        call.q + layers.q_at[row], layers.scratch);
}

}  // namespace

Kernels kernels() {
    return {GRADCOMP_NAME_OF(GRADCOMP_BODY),
            encode,
            decode,
            decode_add,
            reduce,
            scatter_mean,
            contribute,
            squares,
            select_top,
            select_above,
            tail,
            project,
            back_project,
            orthogonalise,
            expand,
            subtract,
            draw_indices,
            relax};
}

}  // namespace gradcomp::GRADCOMP_BODY
