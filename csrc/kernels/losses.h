// The losses of one triplet, a function for each word: the value and its derivatives by d_ap and d_an. Under
// the cosine, S = 1 - d.
#pragma once

#include <algorithm>
#include <cmath>

#include "words.h"

namespace tripletops {

struct Term {
  double loss, slope_ap, slope_an;
};

inline double softplus(double z) { return std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))); }
inline double logistic(double z) { return z >= 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z)); }

// softplus(z), given z and its derivatives.
inline Term softplus_term(double z, double z_ap, double z_an) {
  const double sigma = logistic(z);
  return {softplus(z), sigma * z_ap, sigma * z_an};
}

namespace losses {

inline Term margin(const Numbers& numbers, double d_ap, double d_an) {
  const double z = d_ap - d_an + numbers.margin;
  if (z > 0) return {z, 1, -1};
  return {z == z ? 0 : z, 0, 0};  // NaN stays NaN
}

inline Term soft_margin(const Numbers&, double d_ap, double d_an) {
  return softplus_term(d_ap - d_an, 1, -1);
}

inline Term first_order(const Numbers& numbers, double d_ap, double d_an) {
  const double tau = numbers.temperature;
  return softplus_term((d_ap - d_an) / tau, 1 / tau, -1 / tau);
}

// Equation 16 of "Extreme Triplet Learning": the weights of the pairs are 1 - S_ap and S_an.
inline Term second_order(const Numbers& numbers, double d_ap, double d_an) {
  const double s_ap = 1 - d_ap, s_an = 1 - d_an, tau = numbers.temperature;
  return softplus_term((0.5 * s_an * s_an - s_ap + 0.5 * s_ap * s_ap) / tau, d_ap / tau, -s_an / tau);
}

// Selectively contrastive ("Hard Negative Examples are Hard, but Useful"): where the negative is more similar
// than the positive, it is pushed away alone.
inline Term sct(const Numbers& numbers, double d_ap, double d_an) {
  if (d_an < d_ap) return {numbers.sct_weight * (1 - d_an), 0, -numbers.sct_weight};
  return first_order(numbers, d_ap, d_an);
}

}  // namespace losses
}  // namespace tripletops
