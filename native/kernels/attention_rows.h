// Work on single rows around attention, written once for any vector type V: norms, rotation, half precision, output gate, exp.
// Included by attention_<isa>.cpp only (through attention_body.h), inside an anonymous namespace, after V and Scalar.
#pragma once

// exp(x) for x <= 0 (Cephes expf: range reduction by ln 2, degree 5); exactly 0 below -87; NaN stays NaN.
template <class V>
inline V exp_nonpositive(V x) {
  const V clamped = V::max(V::set1(-87.0f), x);
  const V n = V::round(V::mul(clamped, V::set1(1.44269504088896341f)));
  V r = V::fma(n, V::set1(-0.693359375f), clamped);
  r = V::fma(n, V::set1(2.12194440e-4f), r);
  V p = V::set1(1.9875691500e-4f);
  p = V::fma(p, r, V::set1(1.3981999507e-3f));
  p = V::fma(p, r, V::set1(8.3334519073e-3f));
  p = V::fma(p, r, V::set1(4.1665795894e-2f));
  p = V::fma(p, r, V::set1(1.6666665459e-1f));
  p = V::fma(p, r, V::set1(5.0000001201e-1f));
  const V y = V::add(V::fma(V::mul(r, r), p, r), V::set1(1.0f));
  return V::zero_below(x, -87.0f, V::times_power_of_two(y, n));
}

template <class V>
inline void scale_row(const float* x, float factor, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + V::width <= n; i += V::width) V::mul(V::load(x + i), V::set1(factor)).store(out + i);
  for (; i < n; ++i) out[i] = x[i] * factor;
}

template <class V>
float mean_square(const float* x, int64_t n) {
  V sums[4] = {V::set1(0.0f), V::set1(0.0f), V::set1(0.0f), V::set1(0.0f)};
  int64_t i = 0;
  for (; i + 4 * V::width <= n; i += 4 * V::width)
    for (int j = 0; j < 4; ++j) {
      const V v = V::load(x + i + j * V::width);
      sums[j] = V::fma(v, v, sums[j]);
    }
  float sum = V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])).reduce_add();
  for (; i < n; ++i) sum += x[i] * x[i];
  return sum / static_cast<float>(n);
}

template <class V>
inline void weigh(const float* x, float factor, const float* weight, bool unit_offset, float* out) {
  V w = V::load(weight);
  if (unit_offset) w = V::add(w, V::set1(1.0f));
  V::mul(V::mul(V::load(x), V::set1(factor)), w).store(out);
}

template <class V>
void scale(const float* x, float factor, const float* weight, bool unit_offset, float* out, int64_t n) {
  if (weight == nullptr) return scale_row<V>(x, factor, out, n);
  int64_t i = 0;
  for (; i + V::width <= n; i += V::width) weigh<V>(x + i, factor, weight + i, unit_offset, out + i);
  for (; i < n; ++i) weigh<Scalar>(x + i, factor, weight + i, unit_offset, out + i);
}

template <class V>
inline void rotate_pair(float* x, const float* cos, const float* sin, int64_t half) {
  const V a = V::load(x), b = V::load(x + half);
  V::sub(V::mul(a, V::load(cos)), V::mul(b, V::load(sin))).store(x);
  V::add(V::mul(b, V::load(cos + half)), V::mul(a, V::load(sin + half))).store(x + half);
}

template <class V>
void rotate(float* x, const float* cos, const float* sin, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  for (; i + V::width <= half; i += V::width) rotate_pair<V>(x + i, cos + i, sin + i, half);
  for (; i < half; ++i) rotate_pair<Scalar>(x + i, cos + i, sin + i, half);
}

template <class V>
bool to_half(const float* x, uint16_t* out, int64_t n) {
  bool overflow = false;
  int64_t i = 0;
  for (; i + V::width <= n; i += V::width) overflow |= V::load(x + i).store_half(out + i);
  for (; i < n; ++i) overflow |= Scalar::load(x + i).store_half(out + i);
  return overflow;
}

// sigmoid(g) = (g >= 0 ? 1 : e) / (1 + e) with e = exp(-|g|): never overflows.
template <class V>
inline void gate_at(float* x, const float* gate) {
  const V g = V::load(gate);
  const V e = exp_nonpositive(V::minus_abs(g));
  const V top = V::choose_nonnegative(g, V::set1(1.0f), e);
  V::mul(V::load(x), V::div(top, V::add(V::set1(1.0f), e))).store(x);
}

template <class V>
void gate(float* x, const float* gate, int64_t n) {
  int64_t i = 0;
  for (; i + V::width <= n; i += V::width) gate_at<V>(x + i, gate + i);
  for (; i < n; ++i) gate_at<Scalar>(x + i, gate + i);
}
