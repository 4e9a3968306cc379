// Lists of indices: coded for the wire, drawn, and scattered into means.

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.hpp"
#include "indices.hpp"

namespace gradcomp::bindings {

namespace {

// One row per rank.
using Matrix = nb::ndarray<const std::int64_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

gradcomp::IndexTable view_index_table(const Vector<const std::int32_t>& codings,
                                      const Vector<const std::int64_t>& lengths,
                                      const Vector<const std::int64_t>& counts,
                                      const Vector<const std::int64_t>& offsets,
                                      const Vector<const std::int64_t>& places) {
    const std::size_t rows = codings.size();
    return {static_cast<std::int64_t>(rows),       view_column("codings", codings, rows),
            view_column("lengths", lengths, rows), view_column("counts", counts, rows),
            view_column("offsets", offsets, rows), view_column("places", places, rows)};
}

// Every row inside the two arrays, which do not overlap.
template <class Indices, class Payload>
void check_index_table(const gradcomp::IndexTable& table, const Indices& indices, const Payload& payload) {
    check_aligned("indices", indices);
    const auto* const first = reinterpret_cast<const std::uint8_t*>(indices.data());
    if (indices.size() != 0 && payload.size() != 0 && first < payload.data() + payload.size() &&
        payload.data() < first + indices.size() * sizeof(std::uint32_t))
        throw std::invalid_argument("indices overlap the payload");
    for (std::int64_t row = 0; row < table.rows; ++row)
        gradcomp::check_index_row(row, table[row], static_cast<std::int64_t>(indices.size()), size(payload));
}

void encode_indices(const Vector<const std::int32_t>& codings, const Vector<const std::int64_t>& lengths,
                    const Vector<const std::int64_t>& counts, const Vector<const std::int64_t>& offsets,
                    const Vector<const std::uint32_t>& indices, const Vector<const std::int64_t>& places,
                    const Bytes& payload) {
    const auto table = view_index_table(codings, lengths, counts, offsets, places);
    check_index_table(table, indices, payload);
    run(gradcomp::encode_indices, gradcomp::EncodeIndicesCall{table, indices.data(), payload.data()});
}

void decode_indices(const Vector<const std::int32_t>& codings, const Vector<const std::int64_t>& lengths,
                    const Vector<const std::int64_t>& counts, const Vector<const std::int64_t>& offsets,
                    const Vector<std::uint32_t>& indices, const Vector<const std::int64_t>& places,
                    const ConstBytes& payload) {
    const auto table = view_index_table(codings, lengths, counts, offsets, places);
    check_index_table(table, indices, payload);
    run(gradcomp::decode_indices, gradcomp::DecodeIndicesCall{table, indices.data(), payload.data()});
}

void scatter_mean(const Rows& rows, const Bytes& flags, const Matrix& offsets, const Matrix& counts,
                  const Vector<const std::uint32_t>& indices, const Vector<const float>& values,
                  double divisor, double scale) {
    const auto table = view_table(rows);
    check_per_segment("flags", flags, table);
    check_aligned("offsets", offsets);
    check_aligned("counts", counts);
    check_aligned("indices", indices);
    check_aligned("values", values);
    if (offsets.shape(0) != counts.shape(0) || offsets.shape(1) != rows.shape(0) ||
        counts.shape(1) != rows.shape(0))
        throw std::invalid_argument("offsets and counts do not have a row per rank and an item per segment");
    // What becomes of an element that no rank has; it is to be +0.
    const float untouched = 0.0f / static_cast<float>(divisor) * static_cast<float>(scale);
    if (untouched != 0.0f || std::signbit(untouched))
        throw std::invalid_argument("divisor is not positive, or scale negative or not finite");
    const gradcomp::ScatterCall call{
        table,          flags.data(),  static_cast<std::int64_t>(offsets.shape(0)),
        offsets.data(), counts.data(), indices.data(),
        values.data(),  divisor,       scale};
    const auto capacity = static_cast<std::int64_t>(std::min(indices.size(), values.size()));
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const gradcomp::Segment segment = table[row];
        if (segment.output != 0) gradcomp::check_scatter_row(row, segment, call, capacity);
    }
    run(gradcomp::scatter_mean, call);
}

void draw_indices(const ConstNumbers& length_vector, const ConstNumbers& count_vector,
                  const Vector<const std::uint32_t>& layers, const ConstNumbers& offset_vector,
                  const Vector<std::uint32_t>& indices, std::uint64_t seed, std::uint32_t step,
                  std::uint32_t rank) {
    const std::size_t rows = length_vector.size();
    // Copies: what was checked stays so, whatever else happens to the arrays during the call.
    const auto copied = [rows](const char* name, const ConstNumbers& vector) {
        const std::int64_t* const items = view_column(name, vector, rows);
        return std::vector<std::int64_t>(items, items + rows);
    };
    const auto lengths = copied("lengths", length_vector);
    const auto counts = copied("counts", count_vector);
    const auto offsets = copied("offsets", offset_vector);
    check_aligned("indices", indices);
    const gradcomp::DrawIndicesCall call{static_cast<std::int64_t>(rows),
                                         lengths.data(),
                                         counts.data(),
                                         view_column("layers", layers, rows),
                                         offsets.data(),
                                         indices.data(),
                                         {true, seed, step, rank}};
    gradcomp::check_draws(call, static_cast<std::int64_t>(indices.size()));
    run(gradcomp::active_kernels().draw_indices, call);
}

}  // namespace

void add_indices(nb::module_& module) {
    module.def("encode_indices", &encode_indices, array("codings"), array("lengths"), array("counts"),
               array("offsets"), array("indices"), array("places"), array("payload"));
    module.def("decode_indices", &decode_indices, array("codings"), array("lengths"), array("counts"),
               array("offsets"), array("indices"), array("places"), array("payload"));
    module.def("scatter_mean", &scatter_mean, array("table"), array("flags"), array("offsets"),
               array("counts"), array("indices"), array("values"), nb::kw_only(), "divisor"_a, "scale"_a);
    module.def("draw_indices", &draw_indices, array("lengths"), array("counts"), array("layers"),
               array("offsets"), array("indices"), nb::kw_only(), "seed"_a, "step"_a, "rank"_a);
}

}  // namespace gradcomp::bindings
