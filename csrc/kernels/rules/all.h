// Every candidate: nothing is picked.
#pragma once

#include "../selection.h"

namespace tripletops {

template <class T>
struct AllRule : Rule<T> {
  using Rule<T>::Rule;
};

}  // namespace tripletops
