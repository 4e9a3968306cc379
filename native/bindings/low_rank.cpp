// Factors of a layer as a matrix.

#include <memory>
#include <vector>

#include "arrays.hpp"

namespace gradcomp::bindings {

namespace {

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
        const auto capacity = static_cast<std::size_t>(gradcomp::lowrank_workspace(rank));
        scratch_ = std::make_unique_for_overwrite<float[]>(capacity);
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

}  // namespace

void add_low_rank(nb::module_& module) {
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
}

}  // namespace gradcomp::bindings
