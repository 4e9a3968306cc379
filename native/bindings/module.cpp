// The boundary to Python: every bound is checked, and the GIL is released while kernels run.

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "arrays.hpp"
#include "program.hpp"
#include "threads.hpp"

namespace gradcomp::bindings {

namespace {

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

}  // namespace

}  // namespace gradcomp::bindings

NB_MODULE(_native, module) {
    using namespace gradcomp::bindings;
    add_codecs(module);
    add_headers(module);
    add_indices(module);
    add_selections(module);
    add_low_rank(module);
    add_shared_memory(module);

    module.def("cheapest", &cheapest, array("steps"), array("costs"), array("chosen"), nb::kw_only(),
               "budget"_a);

    module.def("sources_digest", [] { return GRADCOMP_SOURCES_DIGEST; });
    module.def("isa", [] { return gradcomp::active_kernels().isa; });
    module.def("set_isa", &gradcomp::select_kernels, "name"_a);
    module.def("available_isas", &available_isas);
    module.def("threads", &gradcomp::threads);
    module.def("set_threads", &gradcomp::set_threads, "number"_a);
}
