// The boundary to Python: types in the signatures, every bound checked, the GIL released.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "adacomp.hpp"
#include "crc32c.hpp"
#include "indices.hpp"
#include "kernels.hpp"
#include "program.hpp"
#include "shm.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// A codebook's magnitudes, if there is one.
using Magnitudes =
    std::optional<nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;
// A segment table: one row of bytes per segment.
using Rows = nb::ndarray<const std::uint8_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class Item>
using Vector = nb::ndarray<Item, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// One row per rank.
using Matrix = nb::ndarray<const std::int64_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::int64_t size(const ConstBytes& bytes) {
    return static_cast<std::int64_t>(bytes.size());
}
std::int64_t size(const Bytes& bytes) {
    return static_cast<std::int64_t>(bytes.size());
}

gradcomp::SegmentTable view_table(const Rows& rows) {
    if (rows.shape(1) != sizeof(gradcomp::Segment))
        throw std::invalid_argument("the rows of the table do not have the size of a segment");
    return {rows.data(), static_cast<std::int64_t>(rows.shape(0))};
}

void check_per_segment(const char* name, const Bytes& bytes, const gradcomp::SegmentTable& table) {
    if (size(bytes) != table.size())
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes.size()) +
                                    " items for " + std::to_string(table.size()) + " segments");
}

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
        gradcomp::check_magnitudes_row(data, segment.bits);
        checked |= 1u << segment.bits;
    }
    return data;
}

// Round to nearest, keep subnormal numbers: the calling thread may have chosen otherwise.
class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment() {
        std::fegetenv(&callers_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&callers_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

  private:
    std::fenv_t callers_;
};

template <class Call>
void run(void (*kernel)(const Call&), const Call& call) {
    const nb::gil_scoped_release released;
    const DefaultFloatEnvironment environment;
    kernel(call);
}

void encode(int codec_number, const Rows& rows, const Bytes& payload, const Bytes& flags, bool stochastic,
            std::uint64_t seed, std::uint32_t step, std::uint32_t rank, double scale, double decay,
            const Magnitudes& magnitudes) {
    const auto codec = gradcomp::check_codec(codec_number);
    const auto table = view_table(rows);
    check_per_segment("flags", flags, table);
    check_segments(codec, table, size(payload));
    run(gradcomp::active_kernels().encode,
        gradcomp::EncodeCall{codec,
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
    run(gradcomp::active_kernels().decode,
        gradcomp::DecodeCall{codec, table, payload.data(), flags.data(), divisor, scale,
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
    run(gradcomp::active_kernels().decode_add,
        gradcomp::DecodeAddCall{codec, table, payload.data(), scale,
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
    run(gradcomp::active_kernels().reduce,
        gradcomp::ReduceCall{codec,
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

std::uint32_t crc32c(const ConstBytes& data, std::uint32_t value) {
    const nb::gil_scoped_release released;
    return gradcomp::crc32c(data.data(), data.size(), value);
}

template <class Array>
void check_aligned(const char* name, const Array& array) {
    if (reinterpret_cast<std::uintptr_t>(array.data()) % sizeof(*array.data()) != 0)
        throw nb::type_error((std::string(name) + " must be aligned to its items").c_str());
}

template <class Item>
const Item* view_column(const char* name, const Vector<const Item>& column, std::size_t rows) {
    check_aligned(name, column);
    if (column.size() != rows)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(column.size()) +
                                    " items for " + std::to_string(rows) + " rows");
    return column.data();
}

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
    const auto room = static_cast<std::int64_t>(std::min(indices.size(), values.size()));
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const gradcomp::Segment segment = table[row];
        if (segment.output != 0) gradcomp::check_scatter_row(row, segment, call, room);
    }
    run(gradcomp::scatter_mean, call);
}

using ConstFloats = Vector<const float>;
using ConstNumbers = Vector<const std::int64_t>;

template <class Number>
void check_rows(const char* name, const Vector<Number>& vector, const gradcomp::SegmentTable& table) {
    check_aligned(name, vector);
    if (static_cast<std::int64_t>(vector.size()) != table.size())
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(vector.size()) +
                                    " items for " + std::to_string(table.size()) + " segments");
}

// A copy: what was checked stays so, whatever else happens to the array during the call.
std::vector<std::int64_t> copy_rows(const char* name, const ConstNumbers& vector,
                                    const gradcomp::SegmentTable& table) {
    check_rows(name, vector, table);
    return {vector.data(), vector.data() + vector.size()};
}

// Items that both arrays have.
template <class Index, class Value>
std::int64_t common_size(const Vector<Index>& indices, const Vector<Value>& values) {
    check_aligned("indices", indices);
    check_aligned("values", values);
    return static_cast<std::int64_t>(indices.size() < values.size() ? indices.size() : values.size());
}

class Candidates {
  public:
    Candidates(const gradcomp::SegmentTable& table, const std::vector<std::int64_t>& counts)
        : size_(static_cast<std::size_t>(gradcomp::candidate_room(table, counts.data()))),
          memory_(std::make_unique_for_overwrite<std::uint32_t[]>(2 * size_)) {}

    gradcomp::CandidateRoom room() const { return {memory_.get(), memory_.get() + size_}; }

  private:
    std::size_t size_;
    std::unique_ptr<std::uint32_t[]> memory_;
};

void contribute(const Rows& rows, const Bytes& flags, const ConstFloats& factors, double decay) {
    const auto table = view_table(rows);
    check_rows("flags", flags, table);
    check_rows("factors", factors, table);
    gradcomp::check_layers(table);
    gradcomp::check_narrow(table);
    gradcomp::check_shadows(table);
    run(gradcomp::active_kernels().contribute,
        gradcomp::ContributeCall{table, flags.data(), factors.data(), decay});
}

void squares(const Rows& rows, const Vector<double>& out) {
    const auto table = view_table(rows);
    check_rows("out", out, table);
    gradcomp::check_layers(table);
    run(gradcomp::active_kernels().squares, gradcomp::SquaresCall{table, out.data()});
}

void select_top(const Rows& rows, const Bytes& flags, const ConstFloats& factors,
                const ConstNumbers& count_vector, const ConstNumbers& offset_vector,
                const Vector<std::uint32_t>& indices, const Vector<float>& values, double decay) {
    const auto table = view_table(rows);
    check_rows("flags", flags, table);
    check_rows("factors", factors, table);
    const auto counts = copy_rows("counts", count_vector, table);
    const auto offsets = copy_rows("offsets", offset_vector, table);
    gradcomp::check_layers(table);
    gradcomp::check_narrow(table);
    gradcomp::check_shadows(table);
    gradcomp::check_counts(table, counts.data());
    gradcomp::check_places(table, offsets.data(), counts.data(), common_size(indices, values));
    const Candidates candidates(table, counts);
    run(gradcomp::active_kernels().select_top,
        gradcomp::SelectTopCall{table, flags.data(), factors.data(), counts.data(), offsets.data(),
                                indices.data(), values.data(), decay, candidates.room()});
}

void select_above(const Rows& rows, const ConstFloats& thresholds, const ConstNumbers& limit_vector,
                  const ConstNumbers& offset_vector, const Vector<std::uint32_t>& indices,
                  const Vector<float>& values, const Vector<std::int64_t>& found) {
    const auto table = view_table(rows);
    check_rows("thresholds", thresholds, table);
    check_rows("found", found, table);
    const auto limits = copy_rows("limits", limit_vector, table);
    const auto offsets = copy_rows("offsets", offset_vector, table);
    gradcomp::check_layers(table);
    gradcomp::check_shadows(table);
    gradcomp::check_places(table, offsets.data(), limits.data(), common_size(indices, values));
    const Candidates candidates(table, limits);
    run(gradcomp::active_kernels().select_above,
        gradcomp::SelectAboveCall{table, thresholds.data(), limits.data(), offsets.data(), indices.data(),
                                  values.data(), found.data(), candidates.room()});
}

void sample_thresholds(const Rows& rows, const ConstNumbers& count_vector, const Vector<float>& thresholds,
                       std::int64_t stride, std::int64_t phase) {
    const auto table = view_table(rows);
    check_rows("thresholds", thresholds, table);
    const auto counts = copy_rows("counts", count_vector, table);
    gradcomp::check_layers(table);
    gradcomp::check_shadows(table);
    gradcomp::check_counts(table, counts.data());
    if (stride < 1 || phase < 0)
        throw std::invalid_argument("stride " + std::to_string(stride) + " is not positive, or phase " +
                                    std::to_string(phase) + " is negative");
    const auto room = std::make_unique_for_overwrite<std::uint32_t[]>(
        static_cast<std::size_t>(gradcomp::sample_room(table, stride, phase)));
    run(&gradcomp::sample_thresholds,
        gradcomp::SampleCall{table, counts.data(), thresholds.data(), stride, phase, room.get()});
}

void tail(const Rows& rows, const ConstFloats& thresholds, const Vector<std::int64_t>& counts,
          const Vector<double>& sums, const Vector<double>& squares_out, const Vector<float>& maxima) {
    const auto table = view_table(rows);
    check_rows("thresholds", thresholds, table);
    check_rows("counts", counts, table);
    check_rows("sums", sums, table);
    check_rows("squares_out", squares_out, table);
    check_rows("maxima", maxima, table);
    gradcomp::check_layers(table);
    gradcomp::check_shadows(table);
    run(gradcomp::active_kernels().tail, gradcomp::TailCall{table, thresholds.data(), counts.data(),
                                                            sums.data(), squares_out.data(), maxima.data()});
}

// Checks the selections of take and put, indices included; they may come from a peer.
template <class Call, class Value>
void move_selections(void (*kernel)(const Call&), const Rows& rows, const ConstNumbers& offset_vector,
                     const ConstNumbers& count_vector, const Vector<const std::uint32_t>& indices,
                     const Vector<Value>& values) {
    const auto table = view_table(rows);
    const auto offsets = copy_rows("offsets", offset_vector, table);
    const auto counts = copy_rows("counts", count_vector, table);
    gradcomp::check_layers(table);
    gradcomp::check_shadows(table);
    gradcomp::check_places(table, offsets.data(), counts.data(), common_size(indices, values));
    gradcomp::check_indices(table, offsets.data(), counts.data(), indices.data());
    run(kernel, Call{table, offsets.data(), counts.data(), indices.data(), values.data()});
}

void take(const Rows& rows, const ConstNumbers& offsets, const ConstNumbers& counts,
          const Vector<const std::uint32_t>& indices, const Vector<float>& values) {
    move_selections(&gradcomp::take, rows, offsets, counts, indices, values);
}

void put(const Rows& rows, const ConstNumbers& offsets, const ConstNumbers& counts,
         const Vector<const std::uint32_t>& indices, const ConstFloats& values) {
    move_selections(&gradcomp::put, rows, offsets, counts, indices, values);
}

void select_adacomp(const Rows& rows, const ConstFloats& factors, const ConstNumbers& limit_vector,
                    const ConstNumbers& offset_vector, const Vector<std::uint32_t>& indices,
                    const Vector<float>& values, const Vector<std::int64_t>& found, std::int64_t bin_size) {
    const auto table = view_table(rows);
    check_rows("factors", factors, table);
    check_rows("found", found, table);
    const auto limits = copy_rows("limits", limit_vector, table);
    const auto offsets = copy_rows("offsets", offset_vector, table);
    gradcomp::check_layers(table);
    gradcomp::check_narrow(table);
    gradcomp::check_shadows(table);
    gradcomp::check_places(table, offsets.data(), limits.data(), common_size(indices, values));
    if (bin_size < 1)
        throw std::invalid_argument("bin_size " + std::to_string(bin_size) + " is not positive");
    run(&gradcomp::select_adacomp,
        gradcomp::AdacompCall{table, factors.data(), limits.data(), offsets.data(), indices.data(),
                              values.data(), found.data(), bin_size});
}

// The layers of a low-rank call, checked, and the memory that it works in.
class LowRank {
  public:
    LowRank(const Rows& table, const ConstNumbers& rows, const ConstNumbers& columns,
            const ConstNumbers& ranks, const ConstNumbers& p_at, const ConstNumbers& q_at, std::size_t p_size,
            std::size_t q_size, bool outputs)
        : rows_(copy_rows("rows", rows, view_table(table))),
          columns_(copy_rows("columns", columns, view_table(table))),
          ranks_(copy_rows("ranks", ranks, view_table(table))),
          p_at_(copy_rows("p_at", p_at, view_table(table))),
          q_at_(copy_rows("q_at", q_at, view_table(table))),
          layers_{view_table(table), rows_.data(), columns_.data(), ranks_.data(),
                  p_at_.data(),      q_at_.data(), nullptr} {
        const std::int64_t rank = gradcomp::check_low_rank(layers_, static_cast<std::int64_t>(p_size),
                                                           static_cast<std::int64_t>(q_size), outputs);
        const auto room = static_cast<std::size_t>(gradcomp::lowrank_room(rank));
        scratch_ = std::make_unique_for_overwrite<float[]>(room);
        layers_.scratch = scratch_.get();
    }

    LowRank(const LowRank&) = delete;
    LowRank& operator=(const LowRank&) = delete;

    const gradcomp::LowRankLayers& layers() const { return layers_; }
    const gradcomp::SegmentTable& table() const { return layers_.table; }

  private:
    std::vector<std::int64_t> rows_, columns_, ranks_, p_at_, q_at_;
    gradcomp::LowRankLayers layers_;
    std::unique_ptr<float[]> scratch_;
};

void project(const Rows& table, const Bytes& flags, const ConstFloats& factors, const ConstNumbers& rows,
             const ConstNumbers& columns, const ConstNumbers& ranks, const ConstFloats& q,
             const ConstNumbers& q_at, const Vector<float>& p, const ConstNumbers& p_at, double decay) {
    const LowRank low_rank(table, rows, columns, ranks, p_at, q_at, p.size(), q.size(), false);
    check_per_segment("flags", flags, low_rank.table());
    check_rows("factors", factors, low_rank.table());
    run(gradcomp::active_kernels().project,
        gradcomp::ProjectCall{low_rank.layers(), flags.data(), factors.data(), q.data(), p.data(), decay});
}

void back_project(const Rows& table, const ConstNumbers& rows, const ConstNumbers& columns,
                  const ConstNumbers& ranks, const ConstFloats& p, const ConstNumbers& p_at,
                  const Vector<float>& q, const ConstNumbers& q_at) {
    const LowRank low_rank(table, rows, columns, ranks, p_at, q_at, p.size(), q.size(), false);
    run(gradcomp::active_kernels().back_project,
        gradcomp::BackProjectCall{low_rank.layers(), p.data(), q.data()});
}

void orthogonalise(const ConstNumbers& row_counts, const ConstNumbers& rank_counts, const Vector<float>& p,
                   const ConstNumbers& places) {
    const auto count = static_cast<std::int64_t>(row_counts.size());
    const gradcomp::SegmentTable table(nullptr, count);  // only its size is asked for
    const auto rows = copy_rows("rows", row_counts, table);
    const auto ranks = copy_rows("ranks", rank_counts, table);
    const auto p_at = copy_rows("p_at", places, table);
    for (std::size_t row = 0; row < rows.size(); ++row)
        gradcomp::check_factor(static_cast<std::int64_t>(row), "P", p_at[row], rows[row], ranks[row],
                               static_cast<std::int64_t>(p.size()));
    run(gradcomp::active_kernels().orthogonalise,
        gradcomp::OrthogonaliseCall{count, rows.data(), ranks.data(), p.data(), p_at.data()});
}

void expand(const Rows& table, const Bytes& flags, const ConstNumbers& rows, const ConstNumbers& columns,
            const ConstNumbers& ranks, const ConstFloats& p, const ConstNumbers& p_at, const ConstFloats& q,
            const ConstNumbers& q_at, double divisor, double scale) {
    const LowRank low_rank(table, rows, columns, ranks, p_at, q_at, p.size(), q.size(), true);
    check_per_segment("flags", flags, low_rank.table());
    run(gradcomp::active_kernels().expand,
        gradcomp::ExpandCall{low_rank.layers(), flags.data(), p.data(), q.data(), divisor, scale});
}

void subtract(const Rows& table, const ConstNumbers& rows, const ConstNumbers& columns,
              const ConstNumbers& ranks, const ConstFloats& p, const ConstNumbers& p_at, const ConstFloats& q,
              const ConstNumbers& q_at) {
    const LowRank low_rank(table, rows, columns, ranks, p_at, q_at, p.size(), q.size(), false);
    run(gradcomp::active_kernels().subtract, gradcomp::SubtractCall{low_rank.layers(), p.data(), q.data()});
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

// A row per layer, a column per choice.
template <class Item>
using Choices = nb::ndarray<const Item, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

bool cheapest(const Choices<std::int32_t>& steps, const Choices<double>& costs,
              const Vector<std::int32_t>& chosen, std::int64_t budget) {
    check_aligned("steps", steps);
    check_aligned("costs", costs);
    check_aligned("chosen", chosen);
    if (costs.shape(0) != steps.shape(0) || costs.shape(1) != steps.shape(1))
        throw std::invalid_argument("steps and costs do not have the same shape");
    if (chosen.size() != steps.shape(0))
        throw std::invalid_argument("chosen has " + std::to_string(chosen.size()) + " items for " +
                                    std::to_string(steps.shape(0)) + " layers");
    if (std::cmp_greater(steps.shape(1), gradcomp::max_choices))
        throw std::invalid_argument("a layer has more than " + std::to_string(gradcomp::max_choices) +
                                    " choices");
    if (budget < 0) throw std::invalid_argument("budget " + std::to_string(budget) + " is negative");
    bool found = false;
    run(&gradcomp::cheapest, gradcomp::CheapestCall{static_cast<std::int64_t>(steps.shape(0)),
                                                    static_cast<std::int64_t>(steps.shape(1)), steps.data(),
                                                    costs.data(), budget, chosen.data(), &found});
    return found;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const gradcomp::Kernels& kernels : gradcomp::available_kernels()) names.emplace_back(kernels.isa);
    return names;
}

// ------------------------------------------------------------------------------------- shared memory

using Identity = std::tuple<std::int64_t, std::uint64_t>;                      // process, its start
using Location = std::tuple<std::int64_t, std::uint64_t, int, std::uint64_t>;  // process, start, file, nonce

struct ShmOperation {
    gradcomp::shm::Rank::Handle operation;

    int state() const { return static_cast<int>(operation->state.load(std::memory_order_acquire)); }
};

// One rank's hold on a segment. A forked child has neither the thread nor the mapping, and may touch nothing.
class ShmRank {
  public:
    ShmRank(gradcomp::shm::Segment segment, int rank)
        : segment_(std::make_unique<gradcomp::shm::Segment>(std::move(segment))), rank_number_(rank) {}
    ShmRank(const ShmRank&) = delete;
    ShmRank& operator=(const ShmRank&) = delete;
    ~ShmRank() {
        if (owner_.is_this_process()) {
            const nb::gil_scoped_release released;
            rank_.reset();
        } else {
            static_cast<void>(segment_.release());
            static_cast<void>(rank_.release());
        }
    }

    static std::unique_ptr<ShmRank> create(int size, std::uint64_t ring_bytes) {
        const nb::gil_scoped_release released;
        return std::make_unique<ShmRank>(gradcomp::shm::Segment::create(size, ring_bytes), 0);
    }

    static std::unique_ptr<ShmRank> attach(const Location& location, int rank, int size,
                                           std::uint64_t ring_bytes) {
        if (rank < 1 || rank >= size) throw std::invalid_argument("rank is not in 1 .. size - 1");
        const auto& [process, start, file, nonce] = location;
        const nb::gil_scoped_release released;
        return std::make_unique<ShmRank>(
            gradcomp::shm::Segment::attach({{process, start}, file, nonce}, size, ring_bytes), rank);
    }

    Location location() const {
        const auto place = unstarted().place();
        return {place.creator.id, place.creator.start_ticks, place.descriptor, place.nonce};
    }

    void start(const std::vector<Identity>& identities) {
        if (identities.size() != static_cast<std::size_t>(unstarted().size()))
            throw std::invalid_argument("there is not one process for each rank");
        std::vector<gradcomp::shm::Process> processes;
        for (const auto& [process, start] : identities) processes.push_back({process, start});
        const auto segment = std::move(segment_);
        const nb::gil_scoped_release released;
        size_ = segment->size();
        rank_ =
            std::make_unique<gradcomp::shm::Rank>(std::move(*segment), rank_number_, std::move(processes));
    }

    ShmOperation allreduce(const nb::ndarray<nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>& array) {
        using gradcomp::shm::Number;
        const bool is_float32 = array.dtype() == nb::dtype<float>();
        if (!is_float32 && array.dtype() != nb::dtype<double>())
            throw std::invalid_argument("array is neither float32 nor float64");
        if (reinterpret_cast<std::uintptr_t>(array.data()) % array.itemsize() != 0)
            throw std::invalid_argument("array is not aligned");
        return {started().allreduce(is_float32 ? Number::float32 : Number::float64,
                                    static_cast<std::byte*>(array.data()), array.size())};
    }

    ShmOperation alltoallv(const ConstBytes& send, const std::vector<std::int64_t>& send_counts,
                           const Bytes& recv, const std::vector<std::int64_t>& recv_counts) {
        auto& rank = started();
        const auto sends = cut("send", send_counts, const_cast<std::uint8_t*>(send.data()), send.size());
        const auto receives = cut("recv", recv_counts, recv.data(), recv.size());
        const auto own = static_cast<std::size_t>(rank_number_);
        if (send_counts[own] != recv_counts[own])
            throw std::invalid_argument("the own parts of send and recv differ in length");
        return {rank.exchange(sends, receives)};
    }

    ShmOperation allgatherv(const Bytes& buffer, const std::vector<std::int64_t>& counts) {
        auto& rank = started();
        return {rank.allgather(cut("buffer", counts, buffer.data(), buffer.size()))};
    }

    ShmOperation exchange(const std::vector<int>& send_ranks, const std::vector<ConstBytes>& sends,
                          const std::vector<int>& recv_ranks, const std::vector<Bytes>& recvs) {
        auto& rank = started();
        check_peers(send_ranks, sends.size());
        check_peers(recv_ranks, recvs.size());
        std::vector<gradcomp::shm::Part> out, in;
        for (std::size_t i = 0; i < sends.size(); ++i)
            out.push_back({send_ranks[i],
                           reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(sends[i].data())),
                           sends[i].size()});
        for (std::size_t i = 0; i < recvs.size(); ++i)
            in.push_back({recv_ranks[i], reinterpret_cast<std::byte*>(recvs[i].data()), recvs[i].size()});
        return {rank.exchange(out, in)};
    }

    void help() { started().help(); }
    std::string failure() { return started().failure(); }
    void abandon() { started().abandon(); }
    void close() {
        if (!owner_.is_this_process()) return;
        segment_.reset();
        const nb::gil_scoped_release released;
        if (rank_) rank_->close();
    }

  private:
    class Owner {
      public:
        bool is_this_process() const { return gradcomp::shm::process_number() == number_; }
        void check() const {
            if (!is_this_process())
                throw std::runtime_error(
                    "the shared memory belongs to the process that this one was forked from");
        }

      private:
        std::int64_t number_ = gradcomp::shm::process_number();
    };

    gradcomp::shm::Segment& unstarted() const {
        owner_.check();
        if (!segment_) throw std::runtime_error("the rank has been started or closed");
        return *segment_;
    }

    gradcomp::shm::Rank& started() const {
        owner_.check();
        if (!rank_) throw std::runtime_error("the rank has not been started");
        return *rank_;
    }

    // The parts of a buffer, consecutive, for every rank.
    std::vector<gradcomp::shm::Part> cut(const char* name, const std::vector<std::int64_t>& counts,
                                         std::uint8_t* data, std::size_t length) const {
        if (counts.size() != static_cast<std::size_t>(size_))
            throw std::invalid_argument(std::string(name) + " has " + std::to_string(counts.size()) +
                                        " counts for " + std::to_string(size_) + " ranks");
        std::vector<gradcomp::shm::Part> parts;
        auto* at = reinterpret_cast<std::byte*>(data);
        std::uint64_t left = length;
        for (int rank = 0; rank < size_; ++rank) {
            const std::int64_t count = counts[static_cast<std::size_t>(rank)];
            if (count < 0 || static_cast<std::uint64_t>(count) > left)
                throw std::invalid_argument(std::string(name) + " does not hold the parts that are counted");
            parts.push_back({rank, at, static_cast<std::uint64_t>(count)});
            at += count;
            left -= static_cast<std::uint64_t>(count);
        }
        return parts;
    }

    void check_peers(const std::vector<int>& ranks, std::size_t arrays) const {
        if (ranks.size() != arrays) throw std::invalid_argument("there is not one array for each rank");
        std::vector<bool> seen(static_cast<std::size_t>(size_));
        for (const int rank : ranks) {
            if (rank < 0 || rank >= size_ || rank == rank_number_ || seen[static_cast<std::size_t>(rank)])
                throw std::invalid_argument("rank " + std::to_string(rank) +
                                            " is no other rank, or is named twice");
            seen[static_cast<std::size_t>(rank)] = true;
        }
    }

    Owner owner_;
    std::unique_ptr<gradcomp::shm::Segment> segment_;
    std::unique_ptr<gradcomp::shm::Rank> rank_;
    int rank_number_;
    int size_ = 0;
};

Identity shm_process() {
    const auto process = gradcomp::shm::Process::self();
    return {process.id, process.start_ticks};
}

}  // namespace

NB_MODULE(_native, module) {
    // noconvert: an array of another type is refused, not copied.
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
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
    module.def("crc32c", &crc32c, array("data"), "value"_a = 0);

    module.def("encode_indices", &encode_indices, array("codings"), array("lengths"), array("counts"),
               array("offsets"), array("indices"), array("places"), array("payload"));
    module.def("decode_indices", &decode_indices, array("codings"), array("lengths"), array("counts"),
               array("offsets"), array("indices"), array("places"), array("payload"));
    module.def("scatter_mean", &scatter_mean, array("table"), array("flags"), array("offsets"),
               array("counts"), array("indices"), array("values"), nb::kw_only(), "divisor"_a, "scale"_a);

    module.def("contribute", &contribute, array("table"), array("flags"), array("factors"), nb::kw_only(),
               "decay"_a);
    module.def("squares", &squares, array("table"), array("out"));
    module.def("select_top", &select_top, array("table"), array("flags"), array("factors"), array("counts"),
               array("offsets"), array("indices"), array("values"), nb::kw_only(), "decay"_a);
    module.def("select_above", &select_above, array("table"), array("thresholds"), array("limits"),
               array("offsets"), array("indices"), array("values"), array("found"));
    module.def("sample_thresholds", &sample_thresholds, array("table"), array("counts"), array("thresholds"),
               nb::kw_only(), "stride"_a, "phase"_a);
    module.def("tail", &tail, array("table"), array("thresholds"), array("counts"), array("sums"),
               array("squares_out"), array("maxima"));
    module.def("take", &take, array("table"), array("offsets"), array("counts"), array("indices"),
               array("values"));
    module.def("put", &put, array("table"), array("offsets"), array("counts"), array("indices"),
               array("values"));

    module.def("select_adacomp", &select_adacomp, array("table"), array("factors"), array("limits"),
               array("offsets"), array("indices"), array("values"), array("found"), nb::kw_only(),
               "bin_size"_a);
    module.def("project", &project, array("table"), array("flags"), array("factors"), array("rows"),
               array("columns"), array("ranks"), array("q"), array("q_at"), array("p"), array("p_at"),
               nb::kw_only(), "decay"_a);
    module.def("back_project", &back_project, array("table"), array("rows"), array("columns"), array("ranks"),
               array("p"), array("p_at"), array("q"), array("q_at"));
    module.def("orthogonalise", &orthogonalise, array("rows"), array("ranks"), array("p"), array("p_at"));
    module.def("expand", &expand, array("table"), array("flags"), array("rows"), array("columns"),
               array("ranks"), array("p"), array("p_at"), array("q"), array("q_at"), nb::kw_only(),
               "divisor"_a, "scale"_a);
    module.def("subtract", &subtract, array("table"), array("rows"), array("columns"), array("ranks"),
               array("p"), array("p_at"), array("q"), array("q_at"));
    module.def("draw_indices", &draw_indices, array("lengths"), array("counts"), array("layers"),
               array("offsets"), array("indices"), nb::kw_only(), "seed"_a, "step"_a, "rank"_a);

    module.def("cheapest", &cheapest, array("steps"), array("costs"), array("chosen"), nb::kw_only(),
               "budget"_a);

    nb::class_<ShmOperation>(module, "ShmOperation").def("state", &ShmOperation::state);
    nb::class_<ShmRank>(module, "ShmRank")
        .def_static("create", &ShmRank::create, "size"_a, "ring_bytes"_a)
        .def_static("attach", &ShmRank::attach, "location"_a, "rank"_a, "size"_a, "ring_bytes"_a)
        .def("location", &ShmRank::location)
        .def("start", &ShmRank::start, "processes"_a)
        .def("allreduce", &ShmRank::allreduce, array("array"))
        .def("alltoallv", &ShmRank::alltoallv, array("send"), "send_counts"_a, array("recv"), "recv_counts"_a)
        .def("allgatherv", &ShmRank::allgatherv, array("buffer"), "counts"_a)
        .def("exchange", &ShmRank::exchange, "send_ranks"_a, array("sends"), "recv_ranks"_a, array("recvs"))
        .def("help", &ShmRank::help)
        .def("failure", &ShmRank::failure)
        .def("abandon", &ShmRank::abandon)
        .def("close", &ShmRank::close);
    module.def("shm_process", &shm_process);
    module.def("shm_bytes", &gradcomp::shm::segment_bytes, "size"_a, "ring_bytes"_a);

    module.def("isa", [] { return gradcomp::active_kernels().isa; });
    module.def("set_isa", &gradcomp::select_kernels, "name"_a);
    module.def("available_isas", &available_isas);
}
