// Encode, decode, reduce, and what is asked about gradients and payloads.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "arrays.hpp"
#include "body/sample.hpp"
#include "crc32c.hpp"
#include "parts.hpp"

namespace gradcomp::bindings {

namespace {

// A codebook's magnitudes, if there is one.
using Magnitudes =
    std::optional<nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

void check_segments(gradcomp::Codec codec, const gradcomp::SegmentTable& table, std::int64_t payload_size) {
    for (std::int64_t row = 0; row < table.size(); ++row)
        gradcomp::check_segment(codec, row, table[row], payload_size);
}

void check_outputs(gradcomp::Codec codec, const gradcomp::SegmentTable& table, std::int64_t payload_size) {
    for (std::int64_t row = 0; row < table.size(); ++row) {
        if (table[row].output != 0) gradcomp::check_segment(codec, row, table[row], payload_size);
    }
}

// The magnitudes of a call, in order for every row that it will use.
const float* view_magnitudes(gradcomp::Codec codec, const gradcomp::SegmentTable& table,
                             const Magnitudes& magnitudes, bool outputs_only) {
    const float* const data = magnitudes ? magnitudes->data() : nullptr;
    gradcomp::check_magnitudes(codec, data);
    if (data == nullptr) return nullptr;
    if (magnitudes->shape(0) != gradcomp::magnitude_rows ||
        magnitudes->shape(1) != gradcomp::magnitudes_per_row)
        throw std::invalid_argument("magnitudes do not have the shape (9, 128)");
    unsigned checked = 0;
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const gradcomp::Segment segment = table[row];
        if ((outputs_only && segment.output == 0) || (checked >> segment.bits & 1) != 0) continue;
        gradcomp::check_magnitudes_row(codec, data, segment.bits);
        checked |= 1u << segment.bits;
    }
    return data;
}

void encode(int codec_number, const Rows& rows, const Bytes& payload, const Bytes& flags, bool stochastic,
            std::uint64_t seed, std::uint32_t step, std::uint32_t rank, double scale, double decay,
            const Magnitudes& magnitudes) {
    const auto codec = gradcomp::check_codec(codec_number);
    const auto table = view_table(rows);
    check_per_segment("flags", flags, table);
    check_segments(codec, table, size(payload));
    run(gradcomp::encode, gradcomp::EncodeCall{codec,
                                               table,
                                               payload.data(),
                                               flags.data(),
                                               {stochastic, seed, step, rank},
                                               scale,
                                               decay,
                                               view_magnitudes(codec, table, magnitudes, false)});
}

void decode(int codec_number, const Rows& rows, const ConstBytes& payload, const Bytes& flags, double divisor,
            double scale, const Magnitudes& magnitudes) {
    const auto codec = gradcomp::check_codec(codec_number);
    const auto table = view_table(rows);
    check_per_segment("flags", flags, table);
    check_outputs(codec, table, size(payload));
    run(gradcomp::decode, gradcomp::DecodeCall{codec, table, payload.data(), flags.data(), divisor, scale,
                                               view_magnitudes(codec, table, magnitudes, true)});
}

void decode_add(int codec_number, const Rows& rows, const ConstBytes& payload, double scale,
                const Magnitudes& magnitudes) {
    const auto codec = gradcomp::check_codec(codec_number);
    const auto table = view_table(rows);
    check_outputs(codec, table, size(payload));
    for (std::int64_t row = 0; row < table.size(); ++row) {
        if (table[row].output != 0 && table[row].dtype != gradcomp::Dtype::float32)
            throw std::invalid_argument("decode_add adds to float32 outputs only");
    }
    run(gradcomp::decode_add, gradcomp::DecodeAddCall{codec, table, payload.data(), scale,
                                                      view_magnitudes(codec, table, magnitudes, true)});
}

void reduce(int codec_number, const Rows& rows, const std::vector<ConstBytes>& payloads, const Bytes& out,
            const Bytes& flags, bool stochastic, std::uint64_t seed, std::uint32_t step, double divisor,
            double decay, std::uint32_t rank, const Magnitudes& magnitudes) {
    const auto codec = gradcomp::check_codec(codec_number);
    const auto table = view_table(rows);
    check_per_segment("flags", flags, table);
    check_segments(codec, table, size(out));
    if (payloads.empty()) throw std::invalid_argument("reduce needs at least one payload");
    std::vector<const std::uint8_t*> sources;
    for (const ConstBytes& payload : payloads) {
        check_segments(codec, table, size(payload));
        if (payload.data() < out.data() + out.size() && out.data() < payload.data() + payload.size())
            throw std::invalid_argument("out overlaps a payload");
        sources.push_back(payload.data());
    }
    run(gradcomp::reduce, gradcomp::ReduceCall{codec,
                                               table,
                                               sources,
                                               out.data(),
                                               flags.data(),
                                               {stochastic, seed, step, rank},
                                               divisor,
                                               decay,
                                               view_magnitudes(codec, table, magnitudes, false)});
}

void nonzero(const Rows& rows, const Bytes& out) {
    const auto table = view_table(rows);
    check_per_segment("out", out, table);
    for (std::int64_t row = 0; row < table.size(); ++row) gradcomp::check_elements(row, table[row]);
    const nb::gil_scoped_release released;
    for (std::int64_t row = 0; row < table.size(); ++row) out.data()[row] = gradcomp::any_nonzero(table[row]);
}

std::int64_t compact(int codec_number, const Rows& rows, const ConstBytes& payload, const Bytes& out) {
    const auto codec = gradcomp::check_codec(codec_number);
    const auto table = view_table(rows);
    check_segments(codec, table, size(payload));
    std::int64_t room = 0;
    for (std::int64_t row = 0; row < table.size(); ++row) room += gradcomp::wire_bytes(codec, table[row]);
    if (size(out) < room) throw std::invalid_argument("out is too short");
    const nb::gil_scoped_release released;
    return gradcomp::compact(codec, table, payload.data(), out.data());
}

std::int64_t restore(int codec_number, const Rows& rows, const ConstBytes& source, const Bytes& payload) {
    const auto codec = gradcomp::check_codec(codec_number);
    const auto table = view_table(rows);
    check_segments(codec, table, size(payload));
    const nb::gil_scoped_release released;
    return gradcomp::restore(codec, table, source.data(), size(source), payload.data());
}

void sample(const Rows& rows, const Vector<std::uint32_t>& values, std::uint32_t turn) {
    const auto table = view_table(rows);
    check_rows("values", values, table);
    for (std::int64_t row = 0; row < table.size(); ++row) gradcomp::check_elements(row, table[row]);
    const nb::gil_scoped_release released;
    // Models have many small layers of few lengths. Where the elements are single, their places are those of
    // the row before if that has the same length.
    std::vector<std::uint32_t> places;
    std::int64_t length = -1;
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const gradcomp::Segment segment = table[row];
        const gradcomp::Sample part(segment.length, turn);
        std::uint32_t sum = 0;
        if (part.run == 1 && segment.dtype == gradcomp::Dtype::float32) {
            if (segment.length != length) {
                length = segment.length;
                places.clear();
                for (std::int64_t block = 0; block < part.blocks; ++block)
                    if (const std::int64_t place = part.at(block); place < length)
                        places.push_back(static_cast<std::uint32_t>(place));
            }
            const auto* const words = reinterpret_cast<const std::uint32_t*>(segment.gradient);
            for (const std::uint32_t place : places) sum += gradcomp::mixed(words[place], place);
        } else {
            for (std::int64_t block = 0; block < part.blocks; ++block)
                sum += gradcomp::sampled(segment, part, block);
        }
        values.data()[row] = sum;
    }
}

std::uint32_t crc32c(const ConstBytes& data, std::uint32_t value) {
    const nb::gil_scoped_release released;
    return gradcomp::crc32c(data.data(), data.size(), value);
}

}  // namespace

void add_codecs(nb::module_& module) {
    const auto magnitudes = nb::arg("magnitudes").noconvert() = nb::none();

    module.def("encode", &encode, "codec"_a, array("table"), array("payload"), array("flags"), nb::kw_only(),
               "stochastic"_a, "seed"_a, "step"_a, "rank"_a, "scale"_a, "decay"_a, magnitudes);
    module.def("decode", &decode, "codec"_a, array("table"), array("payload"), array("flags"), nb::kw_only(),
               "divisor"_a, "scale"_a, magnitudes);
    module.def("decode_add", &decode_add, "codec"_a, array("table"), array("payload"), nb::kw_only(),
               "scale"_a, magnitudes);
    module.def("reduce", &reduce, "codec"_a, array("table"), array("payloads"), array("out"), array("flags"),
               nb::kw_only(), "stochastic"_a, "seed"_a, "step"_a, "divisor"_a, "decay"_a,
               "rank"_a = gradcomp::owner_rank, magnitudes);
    module.def("nonzero", &nonzero, array("table"), array("out"));
    module.def("compact", &compact, "codec"_a, array("table"), array("payload"), array("out"));
    module.def("restore", &restore, "codec"_a, array("table"), array("source"), array("payload"));
    module.def("sample", &sample, array("table"), array("values"), nb::kw_only(), "turn"_a);
    module.def("crc32c", &crc32c, array("data"), "value"_a = 0);
}

}  // namespace gradcomp::bindings
