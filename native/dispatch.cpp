// Which of the compiled bodies runs, decided once per process.

#include <atomic>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace gradcomp {

namespace baseline {
Kernels kernels();
}

#ifdef GRADCOMP_X86
namespace avx2 {
Kernels kernels();
}
namespace avx512 {
Kernels kernels();
}
#endif

namespace {

std::vector<Kernels> find_kernels() {
    std::vector<Kernels> found;
#ifdef GRADCOMP_X86
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back(avx512::kernels());
    if (has_avx2) found.push_back(avx2::kernels());
#endif
    found.push_back(baseline::kernels());
    return found;
}

std::atomic<const Kernels*>& active() {
    static std::atomic<const Kernels*> kernels = &available_kernels().front();
    return kernels;
}

}  // namespace

const std::vector<Kernels>& available_kernels() {
    static const std::vector<Kernels> found = find_kernels();
    return found;
}

const Kernels& active_kernels() {
    return *active().load(std::memory_order_relaxed);
}

void select_kernels(std::string_view isa) {
    for (const Kernels& kernels : available_kernels()) {
        if (kernels.isa == isa) {
            active().store(&kernels, std::memory_order_relaxed);
            return;
        }
    }
    throw std::invalid_argument("this build on this CPU has no kernels for '" + std::string(isa) + "'");
}

}  // namespace gradcomp
