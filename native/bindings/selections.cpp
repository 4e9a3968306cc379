// Which elements of a layer are sent: contributions, thresholds, selections.

#include <memory>
#include <vector>

#include "adacomp.hpp"
#include "arrays.hpp"

namespace gradcomp::bindings {

namespace {

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
        : size_(static_cast<std::size_t>(gradcomp::candidate_capacity(table, counts.data()))),
          memory_(std::make_unique_for_overwrite<std::uint32_t[]>(2 * size_)) {}

    gradcomp::CandidateSpace space() const { return {memory_.get(), memory_.get() + size_}; }

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
    gradcomp::check_next_residuals(table);
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
                const Vector<std::uint32_t>& indices, const Vector<float>& values,
                const Vector<std::int64_t>& found, double decay, bool zeros) {
    const auto table = view_table(rows);
    check_rows("flags", flags, table);
    check_rows("factors", factors, table);
    check_rows("found", found, table);
    const auto counts = copy_rows("counts", count_vector, table);
    const auto offsets = copy_rows("offsets", offset_vector, table);
    gradcomp::check_layers(table);
    gradcomp::check_narrow(table);
    gradcomp::check_next_residuals(table);
    gradcomp::check_counts(table, counts.data());
    gradcomp::check_places(table, offsets.data(), counts.data(), common_size(indices, values));
    const Candidates candidates(table, counts);
    run(gradcomp::active_kernels().select_top,
        gradcomp::SelectTopCall{table, flags.data(), factors.data(), counts.data(), offsets.data(),
                                indices.data(), values.data(), found.data(), decay, zeros,
                                candidates.space()});
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
    gradcomp::check_next_residuals(table);
    gradcomp::check_places(table, offsets.data(), limits.data(), common_size(indices, values));
    const Candidates candidates(table, limits);
    run(gradcomp::active_kernels().select_above,
        gradcomp::SelectAboveCall{table, thresholds.data(), limits.data(), offsets.data(), indices.data(),
                                  values.data(), found.data(), candidates.space()});
}

void sample_thresholds(const Rows& rows, const ConstNumbers& count_vector, const Vector<float>& thresholds,
                       std::int64_t stride, std::int64_t phase) {
    const auto table = view_table(rows);
    check_rows("thresholds", thresholds, table);
    const auto counts = copy_rows("counts", count_vector, table);
    gradcomp::check_layers(table);
    gradcomp::check_next_residuals(table);
    gradcomp::check_counts(table, counts.data());
    if (stride < 1 || phase < 0)
        throw std::invalid_argument("stride " + std::to_string(stride) + " is not positive, or phase " +
                                    std::to_string(phase) + " is negative");
    const auto space = std::make_unique_for_overwrite<std::uint32_t[]>(
        static_cast<std::size_t>(gradcomp::sample_capacity(table, stride, phase)));
    run(&gradcomp::sample_thresholds,
        gradcomp::SampleCall{table, counts.data(), thresholds.data(), stride, phase, space.get()});
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
    gradcomp::check_next_residuals(table);
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
    gradcomp::check_next_residuals(table);
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
    gradcomp::check_next_residuals(table);
    gradcomp::check_places(table, offsets.data(), limits.data(), common_size(indices, values));
    if (bin_size < 1)
        throw std::invalid_argument("bin_size " + std::to_string(bin_size) + " is not positive");
    run(&gradcomp::select_adacomp,
        gradcomp::AdacompCall{table, factors.data(), limits.data(), offsets.data(), indices.data(),
                              values.data(), found.data(), bin_size});
}

}  // namespace

void add_selections(nb::module_& module) {
    module.def("contribute", &contribute, array("table"), array("flags"), array("factors"), nb::kw_only(),
               "decay"_a);
    module.def("squares", &squares, array("table"), array("out"));
    module.def("select_top", &select_top, array("table"), array("flags"), array("factors"), array("counts"),
               array("offsets"), array("indices"), array("values"), array("found"), nb::kw_only(), "decay"_a,
               "zeros"_a);
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
}

}  // namespace gradcomp::bindings
