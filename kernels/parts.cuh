// A launch: a kernel for several parts at once.
//
// A part is the items of one table, with arguments of its own: whatever the number of tables, there
// is one launch. A kernel is written for one part. Its first parameter says which of the part's
// items are this thread's; the loops of platform.cuh walk through those. The arguments of all parts
// are words of 8 bytes in one array, those of a part side by side.
//
// On the GPU a part has blocks of its own, as many as its items are worth: the lanes of a warp, and
// what a warp adds to a counter, belong to one part. On the CPU workers take pieces of the items of
// all parts.
#ifndef SOK_PARTS_CUH_
#define SOK_PARTS_CUH_

// Numbers 0 to kCount - 1 as parameters of a template.
template <int... kNumbers>
struct SokNumbers {};
template <int kCount, int... kNumbers>
struct SokNumbersTo : SokNumbersTo<kCount - 1, kCount - 1, kNumbers...> {};
template <int... kNumbers>
struct SokNumbersTo<0, kNumbers...> {
  typedef SokNumbers<kNumbers...> Type;
};

// The argument that a word holds.
template <class T>
struct SokArgument;
template <class T>
struct SokArgument<T*> {
  static SOK_DEVICE_MEMBER T* of(u64 word) { return (T*)word; }
};
template <>
struct SokArgument<i64> {
  static SOK_DEVICE_MEMBER i64 of(u64 word) { return (i64)word; }
};
template <>
struct SokArgument<f32> {
  static SOK_DEVICE_MEMBER f32 of(u64 word) { return sok_bits_f32((u32)word); }
};

// Calls a kernel for a part; word_of(i) is its i-th argument.
template <auto kKernel, class WordOf, class... A, int... kNumbers>
SOK_DEVICE void sok_call(void (*)(SokShare, A...), SokNumbers<kNumbers...>, const SokShare& share,
                         const WordOf& word_of) {
  kKernel(share, SokArgument<A>::of(word_of(kNumbers))...);
}

#ifdef __CUDACC__
// The words are where the compiler reads an argument as cheaply as a constant: in the launch
// itself. In memory they took more registers, and `find` 1.6 times as long. A wide launch costs 2
// us more than a narrow one, so each file is compiled for both (backend/gpu_binaries.py).
//
// First come the first block of each part and the number of all blocks, then the arguments.
#ifndef SOK_LAUNCH_WORDS
#define SOK_LAUNCH_WORDS 480
#endif
struct SokArguments {
  u64 word[SOK_LAUNCH_WORDS];
};

template <auto kKernel, class... A>
SOK_DEVICE void sok_run_part(void (*kernel)(SokShare, A...), const SokArguments& words,
                             i64 num_parts) {
  i64 part = 0;
  for (i64 end = num_parts; end - part > 1;) {
    const i64 middle = (part + end) / 2;
    if (words.word[middle] <= blockIdx.x)
      part = middle;
    else
      end = middle;
  }
  const u64 first = words.word[part], threads = blockDim.x;
  const SokShare share{(i64)((blockIdx.x - first) * threads + threadIdx.x),
                       (i64)((words.word[part + 1] - first) * threads)};
  const i64 arguments = num_parts + 1 + part * (i64)sizeof...(A);
  sok_call<kKernel>(kernel, typename SokNumbersTo<sizeof...(A)>::Type(), share,
                    [&](int i) { return words.word[arguments + i]; });
}

#define SOK_EXPORT(name)                                                                       \
  extern "C" __global__ void name(const __grid_constant__ SokArguments words, i64 num_parts) { \
    sok_run_part<name##_of_part>(name##_of_part, words, num_parts);                            \
  }
#else
// How cpu_runtime.cpp calls a kernel, and a text with one letter for each parameter by which Python
// checks what it passes.
template <class T>
struct SokCode;
#define SOK_CODE(type, letter)            \
  template <>                             \
  struct SokCode<type> {                  \
    static constexpr char value = letter; \
  };
SOK_CODE(i64*, 'q')
SOK_CODE(const i64*, 'q')
SOK_CODE(u64*, 'Q')
SOK_CODE(const u64*, 'Q')
SOK_CODE(i32*, 'i')
SOK_CODE(const i32*, 'i')
SOK_CODE(u32*, 'I')
SOK_CODE(const u32*, 'I')
SOK_CODE(u16*, 'H')
SOK_CODE(const u16*, 'H')
SOK_CODE(u8*, 'B')
SOK_CODE(const u8*, 'B')
SOK_CODE(f32*, 'f')
SOK_CODE(const f32*, 'f')
SOK_CODE(f64*, 'd')
SOK_CODE(const f64*, 'd')
SOK_CODE(i64, '#')
SOK_CODE(f32, '.')
#undef SOK_CODE

template <class... A>
static inline const char* sok_signature(void (*)(SokShare, A...)) {
  static const char text[] = {SokCode<A>::value..., 0};
  return text;
}
template <auto kKernel, class... A>
static inline void sok_run_part(void (*kernel)(SokShare, A...), const SokShare& share,
                                const u64* words) {
  sok_call<kKernel>(kernel, typename SokNumbersTo<sizeof...(A)>::Type(), share,
                    [&](int i) { return words[i]; });
}
// Of a kernel the type alone is named: with its address g++ would compile it a second time, by
// itself, beside the one that is inlined here.
#define SOK_EXPORT(name)                                                                       \
  extern "C" __attribute__((visibility("default"))) void sok_run_##name(const SokShare* share, \
                                                                        const u64* words) {    \
    sok_run_part<name##_of_part>((decltype(&name##_of_part))nullptr, *share, words);           \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) const char* sok_signature_##name() {       \
    return sok_signature((decltype(&name##_of_part))nullptr);                                  \
  }
#endif

#endif  // SOK_PARTS_CUH_
