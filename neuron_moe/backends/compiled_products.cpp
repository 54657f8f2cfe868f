// Rows times the matrices of their experts, all experts of a step in one call.
//
// out[r, n] = sum over k of rows[r, k] * matrices[e, n, k], plus bias[e, n]; sums in float32.
//
// A thread takes PIECE columns of one expert at a time, whoever is free the next ones, and reads
// each matrix once, the rows of the next tile ahead. So a step with few rows goes at the speed of
// the memory, and meets one barrier where a product for each expert meets one each.
//
// Where the processor has matrix tiles (AMX), bfloat16 steps with several rows an expert use them: a
// tile of the matrix as it lies, 16 columns by 32 inputs, times 16 rows that were transposed before.
//
// Letters: r row, n column (output), k input; a run is the rows of one expert.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

namespace {

#if defined(__AVX512F__)
constexpr ptrdiff_t VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr ptrdiff_t VECTOR_BYTES = 32, REGISTERS = 16;
#else
constexpr ptrdiff_t VECTOR_BYTES = 16, REGISTERS = 16;
#endif
constexpr int TILE_COLUMNS = 4;
constexpr ptrdiff_t PIECE = 128;       // columns
constexpr ptrdiff_t CACHED_ROWS = 96;  // that stay in the cache while the columns of a piece pass
constexpr int FIRST_LEVEL = 3, SECOND_LEVEL = 2;  // of the caches, where what is read ahead goes
constexpr ptrdiff_t READ_AHEAD = 4096;            // bytes, of a matrix that is read in order
// Rows of an expert up to which its matrix is read in order; measured with 16 registers only.
constexpr ptrdiff_t FEW_ROWS = REGISTERS == 16 ? 4 : 0;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));

// Rows of a tile: as many as leave registers for the operands; which is fastest was measured.
template <class Number>
constexpr int TILE_ROWS = REGISTERS == 16 ? 2 : sizeof(Number) == 4 ? 6 : 4;

float widen(float value) { return value; }

float widen(uint16_t bfloat16) {
  uint32_t word = (uint32_t)bfloat16 << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

inline void multiply_add(Floats& sum, const float* left, const float* right) {
  Floats a, b;
  memcpy(&a, left, sizeof a);
  memcpy(&b, right, sizeof b);
  sum += a * b;
}

inline void multiply_add(Floats& sum, const uint16_t* left, const uint16_t* right) {
#if defined(__AVX512BF16__)
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(left),
                                 (__m512bh)_mm512_loadu_si512(right));
#else
  Words a, b;  // two bfloat16 each
  memcpy(&a, left, sizeof a);
  memcpy(&b, right, sizeof b);
  sum += (Floats)(a << 16) * (Floats)(b << 16);
  sum += (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}

// The sum of the lanes of each.
inline Four add_up(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
#if defined(__AVX512F__)
  const auto half = [](const Floats& sum) {
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)sum),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)sum, 1)));
  };
  const __m256 quarters = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)),
                                         _mm256_hadd_ps(half(c), half(d)));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1));
#else
  Four total = {};
  for (size_t lane = 0; lane < sizeof a / sizeof(float); lane++)
    total += Four{a[lane], b[lane], c[lane], d[lane]};
  return total;
#endif
}

#if defined(__AVX512F__)
// The same of four rows at once, in half the instructions: lane 4 r + n is row r, column n.
template <int ROWS>
inline __m512 add_up_four_rows(const Floats (&sums)[TILE_COLUMNS][ROWS]) {
  __m512 rows[4];
  for (int r = 0; r < 4; r++) {
    const auto pair = [&](int n) {
      const __m512 left = (__m512)sums[n][r], right = (__m512)sums[n + 1][r];
      return _mm512_castps_pd(
          _mm512_add_ps(_mm512_unpacklo_ps(left, right), _mm512_unpackhi_ps(left, right)));
    };
    const __m512d left = pair(0), right = pair(2);
    rows[r] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  }
  const auto halves = [](const __m512& a, const __m512& b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 upper = halves(rows[0], rows[1]), lower = halves(rows[2], rows[3]);
  return _mm512_add_ps(_mm512_shuffle_f32x4(upper, lower, 0x88),
                       _mm512_shuffle_f32x4(upper, lower, 0xdd));
}
#endif

// The sums of the lanes, of each row those of its columns.
template <int ROWS>
inline void add_up_tile(const Floats (&sums)[TILE_COLUMNS][ROWS], Four (&totals)[ROWS]) {
  int done = 0;
#if defined(__AVX512F__)
  if constexpr (ROWS >= 4) {
    const __m512 four = add_up_four_rows(sums);
    memcpy(totals, &four, sizeof four);
    done = 4;
  }
#endif
#pragma GCC unroll 6
  for (int r = done; r < ROWS; r++)
    totals[r] = add_up(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
}

// What one call has in common.
template <class Number>
struct Step {
  const Number *rows, *matrices, *bias;
  float* out;
  const int64_t *experts, *starts;
  ptrdiff_t num_runs, num_inputs, num_outputs;
  const int64_t* transposed_starts;  // of each run in `transposed`, in rows
  uint32_t* transposed;              // null: no tiles
};

template <class Number>
float dot(const Number* left, const Number* right, ptrdiff_t first, ptrdiff_t end) {
  float total = 0;
  for (ptrdiff_t k = first; k < end; k++) total += widen(left[k]) * widen(right[k]);
  return total;
}

// The same lane by lane, one column after the other: a matrix is read from its first byte to its
// last, as fast as memory gives it.
template <class Number, int ROWS>
inline __attribute__((always_inline)) void add_in_order(
    const Number* rows, const Number* matrix, ptrdiff_t whole, ptrdiff_t num_inputs,
    Floats (&sums)[TILE_COLUMNS][ROWS]) {
  constexpr ptrdiff_t LANES = VECTOR_BYTES / sizeof(Number);
  for (int n = 0; n < TILE_COLUMNS; n++) {
    Floats even[ROWS] = {}, odd[ROWS] = {};
    const Number* column = matrix + n * num_inputs;
    ptrdiff_t k = 0;
    for (; k + LANES < whole; k += 2 * LANES) {
      __builtin_prefetch(column + k + READ_AHEAD / sizeof(Number), 0, FIRST_LEVEL);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const Number* row = rows + r * num_inputs + k;
        multiply_add(even[r], column + k, row);
        multiply_add(odd[r], column + k + LANES, row + LANES);
      }
    }
    for (int r = 0; r < ROWS; r++) {
      if (k < whole) multiply_add(even[r], column + k, rows + r * num_inputs + k);
      sums[n][r] = even[r] + odd[r];
    }
  }
}

// ROWS rows times TILE_COLUMNS columns of a matrix.
template <class Number, int ROWS, bool IN_ORDER>
inline __attribute__((always_inline)) void multiply_tile(
    const Number* rows, const Number* matrix, const Number* bias, float* out,
    ptrdiff_t num_inputs, ptrdiff_t num_outputs) {
  constexpr ptrdiff_t LANES = VECTOR_BYTES / sizeof(Number);
  Floats sums[TILE_COLUMNS][ROWS] = {};
  const ptrdiff_t whole = num_inputs / LANES * LANES;
  if constexpr (IN_ORDER) add_in_order(rows, matrix, whole, num_inputs, sums);
  for (ptrdiff_t k = 0; !IN_ORDER && k < whole; k += LANES) {
#pragma GCC unroll 4
    for (int n = 0; n < TILE_COLUMNS; n++) {
      const Number* place = matrix + n * num_inputs + k;
      __builtin_prefetch(place + TILE_COLUMNS * num_inputs, 0, SECOND_LEVEL);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) multiply_add(sums[n][r], place, rows + r * num_inputs + k);
    }
  }
  Four totals[ROWS];
  add_up_tile(sums, totals);
  if (whole < num_inputs)
    for (int r = 0; r < ROWS; r++)
      for (int n = 0; n < TILE_COLUMNS; n++)
        totals[r][n] += dot(rows + r * num_inputs, matrix + n * num_inputs, whole, num_inputs);
  const Four added = bias ? Four{widen(bias[0]), widen(bias[1]), widen(bias[2]), widen(bias[3])}
                          : Four{};
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
    const Four total = totals[r] + added;
    memcpy(out + r * num_outputs, &total, sizeof total);
  }
}

// Some rows of one run times the columns from `column` to `end`.
template <class Number>
void multiply_piece(const Step<Number>& step, ptrdiff_t expert, ptrdiff_t first_row,
                    ptrdiff_t end_row, ptrdiff_t column, ptrdiff_t end) {
  const ptrdiff_t inputs = step.num_inputs, outputs = step.num_outputs;
  for (; column < end; column += TILE_COLUMNS) {
    const bool is_whole = column + TILE_COLUMNS <= end;
    const Number* matrix = step.matrices + (expert * outputs + column) * inputs;
    const Number* bias = step.bias ? step.bias + expert * outputs + column : nullptr;
    const Number* rows = step.rows + first_row * inputs;
    float* out = step.out + first_row * outputs + column;
    ptrdiff_t left = end_row - first_row;
    const auto tiles_of = [&](auto size, auto in_order) {
      constexpr int ROWS = decltype(size)::value;
      for (; is_whole && left >= ROWS; left -= ROWS, rows += ROWS * inputs, out += ROWS * outputs)
        multiply_tile<Number, ROWS, in_order()>(rows, matrix, bias, out, inputs, outputs);
    };
    if (end_row - first_row <= FEW_ROWS) {
      tiles_of(std::integral_constant<int, 4>(), std::true_type());
      tiles_of(std::integral_constant<int, 3>(), std::true_type());
      tiles_of(std::integral_constant<int, 2>(), std::true_type());
      tiles_of(std::integral_constant<int, 1>(), std::true_type());
    }
    tiles_of(std::integral_constant<int, TILE_ROWS<Number>>(), std::false_type());
    tiles_of(std::integral_constant<int, 2>(), std::false_type());
    tiles_of(std::integral_constant<int, 1>(), std::false_type());
    for (; left > 0; left--, rows += inputs, out += outputs)
      for (ptrdiff_t n = 0; n < end - column; n++)
        out[n] = dot(rows, matrix + n * inputs, 0, inputs) + (bias ? widen(bias[n]) : 0.0f);
  }
}

#if HAS_TILES
constexpr int TILE = 16;            // rows of a tile, and words (pairs of bfloat16) of a row
constexpr int TILE_INPUTS = 2 * TILE;

bool may_use_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux, once for a process
  static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return may;
}

// Eight tiles of 16 rows of 64 bytes. Static: compilers do not see how much of it is read.
struct TileShapes {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
alignas(64) const TileShapes TILE_SHAPES = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
static_assert(sizeof TILE_SHAPES == 64, "as the processor reads it");

// Words of the rows of a run, [inputs / 2][16] for each 16 rows; missing ones are zeros.
void turn_rows(const Step<uint16_t>& step, ptrdiff_t run) {
  const ptrdiff_t inputs = step.num_inputs, end = step.starts[run + 1];
  uint32_t* transposed = step.transposed + step.transposed_starts[run] * (inputs / 2);
  const ptrdiff_t num_rows = step.transposed_starts[run + 1] - step.transposed_starts[run];
  for (ptrdiff_t first = 0; first < num_rows; first += TILE, transposed += TILE * (inputs / 2))
    for (ptrdiff_t word = 0; word < inputs / 2; word += TILE)
      for (int r = 0; r < TILE; r++) {
        const ptrdiff_t row = step.starts[run] + first + r;
        uint32_t words[TILE] = {};
        if (row < end) memcpy(words, step.rows + row * inputs + 2 * word, sizeof words);
        for (int w = 0; w < TILE; w++) transposed[(word + w) * TILE + r] = words[w];
      }
}

// Sums lie as [columns][rows].
void put_tile(const float* sums, ptrdiff_t num_rows, const uint16_t* bias, float* out,
              ptrdiff_t num_outputs) {
  for (ptrdiff_t r = 0; r < num_rows && r < TILE; r++)
    for (int n = 0; n < TILE; n++)
      out[r * num_outputs + n] = sums[n * TILE + r] + (bias ? widen(bias[n]) : 0.0f);
}

// All rows of a run times the columns from `column` to `end`, 32 by 32.
void multiply_tiles(const Step<uint16_t>& step, ptrdiff_t run, ptrdiff_t column, ptrdiff_t end) {
  alignas(64) float sums[4][TILE * TILE];
  const ptrdiff_t inputs = step.num_inputs, outputs = step.num_outputs;
  const ptrdiff_t num_rows = step.starts[run + 1] - step.starts[run];
  const uint32_t* transposed = step.transposed + step.transposed_starts[run] * (inputs / 2);
  _tile_loadconfig(&TILE_SHAPES);
  for (ptrdiff_t first = 0; first < num_rows; first += 2 * TILE)
    for (ptrdiff_t at = column; at < end; at += 2 * TILE) {
      const ptrdiff_t place = step.experts[run] * outputs + at;
      const uint16_t* upper = step.matrices + place * inputs;
      const uint16_t* lower = upper + TILE * inputs;
      const uint32_t* left = transposed + first * (inputs / 2);
      const uint32_t* right = left + TILE * (inputs / 2);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (ptrdiff_t k = 0; k < inputs; k += TILE_INPUTS) {
        for (int n = 0; first == 0 && n < 2 * TILE; n++)
          __builtin_prefetch(upper + (2 * TILE + n) * inputs + k, 0, SECOND_LEVEL);
        _tile_loadd(4, upper + k, 2 * inputs);
        _tile_loadd(5, lower + k, 2 * inputs);
        _tile_loadd(6, left + k / 2 * TILE, 4 * TILE);
        _tile_loadd(7, right + k / 2 * TILE, 4 * TILE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums[0], 4 * TILE);
      _tile_stored(1, sums[1], 4 * TILE);
      _tile_stored(2, sums[2], 4 * TILE);
      _tile_stored(3, sums[3], 4 * TILE);
      for (int tile = 0; tile < 4; tile++) {
        const ptrdiff_t row = first + tile / 2 * TILE, n = tile % 2 * TILE;
        put_tile(sums[tile], num_rows - row, step.bias ? step.bias + place + n : nullptr,
                 step.out + (step.starts[run] + row) * outputs + at + n, outputs);
      }
    }
  _tile_release();
}
#else
bool may_use_tiles() { return false; }
void turn_rows(const Step<uint16_t>&, ptrdiff_t) {}
void multiply_tiles(const Step<uint16_t>&, ptrdiff_t, ptrdiff_t, ptrdiff_t) {}
#endif

void turn_rows(const Step<float>&, ptrdiff_t) {}
void multiply_tiles(const Step<float>&, ptrdiff_t, ptrdiff_t, ptrdiff_t) {}

template <class Number>
void multiply(const Step<Number>& step, int num_threads) {
  const ptrdiff_t pieces = (step.num_outputs + PIECE - 1) / PIECE;
#pragma omp parallel num_threads(num_threads)
  {
    if (step.transposed) {
#pragma omp for schedule(dynamic, 1)
      for (ptrdiff_t run = 0; run < step.num_runs; run++) turn_rows(step, run);
    }
#pragma omp for schedule(dynamic, 1)
    for (ptrdiff_t task = 0; task < step.num_runs * pieces; task++) {
      const ptrdiff_t run = task / pieces, column = task % pieces * PIECE;
      const ptrdiff_t end = column + PIECE < step.num_outputs ? column + PIECE : step.num_outputs;
      const ptrdiff_t end_row = step.transposed ? 0 : step.starts[run + 1];
      if (step.transposed) multiply_tiles(step, run, column, end);
      for (ptrdiff_t row = step.starts[run]; row < end_row; row += CACHED_ROWS) {
        const ptrdiff_t last = row + CACHED_ROWS < end_row ? row + CACHED_ROWS : end_row;
        multiply_piece(step, step.experts[run], row, last, column, end);
      }
    }
  }
}

}  // namespace

extern "C" {

// Whether bfloat16 products may be given memory for transposed rows, and then use tiles.
int has_tiles() { return may_use_tiles(); }

void multiply_float32(const float* rows, const float* matrices, const float* bias, float* out,
                      const int64_t* experts, const int64_t* starts, const int64_t*, uint32_t*,
                      int64_t num_runs, int64_t num_inputs, int64_t num_outputs, int num_threads) {
  multiply<float>({rows, matrices, bias, out, experts, starts, num_runs, num_inputs, num_outputs,
                   nullptr, nullptr},
                  num_threads);
}

void multiply_bfloat16(const uint16_t* rows, const uint16_t* matrices, const uint16_t* bias,
                       float* out, const int64_t* experts, const int64_t* starts,
                       const int64_t* transposed_starts, uint32_t* transposed, int64_t num_runs,
                       int64_t num_inputs, int64_t num_outputs, int num_threads) {
  multiply<uint16_t>({rows, matrices, bias, out, experts, starts, num_runs, num_inputs,
                      num_outputs, transposed_starts, transposed},
                     num_threads);
}

}
