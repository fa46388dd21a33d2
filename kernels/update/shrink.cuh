// The step of proximal rules that follows the gradient's: towards 0, and to 0 where that is near.
#pragma once
#include "platform.cuh"

// The x that makes |x| * l1 + x^2 * l2 / 2 + (x - w)^2 / (2 * lr) least.
SOK_DEVICE f32 shrunk(f32 w, f32 lr, f32 l1, f32 l2) {
  const f32 divisor = 1.0f + l2 * lr;
  if (l1 == 0.0f) return w / divisor;
  const f32 size = (w < 0.0f ? -w : w) - lr * l1;
  // A NaN stays one.
  const f32 left = size < 0.0f ? 0.0f : size;
  return (w < 0.0f ? -left : left) / divisor;
}
