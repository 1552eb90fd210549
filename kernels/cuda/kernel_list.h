// Every CUDA kernel: its name in the image, and the struct that is its body.
#pragma once

#define FOREBAY_F32 ::forebay::DataType::kFloat32
#define FOREBAY_BF16 ::forebay::DataType::kBfloat16
#define FOREBAY_F16 ::forebay::DataType::kFloat16

// X(name, struct of elements.h)
#define FOREBAY_ELEMENT_KERNELS(X)                                      \
  X(forebay_cast_fp32_bf16, Cast<FOREBAY_F32, FOREBAY_BF16>)            \
  X(forebay_cast_fp32_fp16, Cast<FOREBAY_F32, FOREBAY_F16>)             \
  X(forebay_cast_bf16_fp32, Cast<FOREBAY_BF16, FOREBAY_F32>)            \
  X(forebay_cast_bf16_fp16, Cast<FOREBAY_BF16, FOREBAY_F16>)            \
  X(forebay_cast_fp16_fp32, Cast<FOREBAY_F16, FOREBAY_F32>)             \
  X(forebay_cast_fp16_bf16, Cast<FOREBAY_F16, FOREBAY_BF16>)            \
  X(forebay_accumulate_fp32, Accumulate<FOREBAY_F32>)                   \
  X(forebay_accumulate_bf16, Accumulate<FOREBAY_BF16>)                  \
  X(forebay_accumulate_fp16, Accumulate<FOREBAY_F16>)                   \
  X(forebay_scale_fp32_fp32, Scale<FOREBAY_F32, FOREBAY_F32>)           \
  X(forebay_scale_bf16_bf16, Scale<FOREBAY_BF16, FOREBAY_BF16>)         \
  X(forebay_scale_bf16_fp32, Scale<FOREBAY_BF16, FOREBAY_F32>)          \
  X(forebay_scale_fp16_fp16, Scale<FOREBAY_F16, FOREBAY_F16>)           \
  X(forebay_scale_fp16_fp32, Scale<FOREBAY_F16, FOREBAY_F32>)           \
  X(forebay_add_fp32, Add<FOREBAY_F32>)                                 \
  X(forebay_add_bf16, Add<FOREBAY_BF16>)                                \
  X(forebay_add_fp16, Add<FOREBAY_F16>)                                 \
  X(forebay_fill_fp32, Fill<FOREBAY_F32>)                               \
  X(forebay_fill_bf16, Fill<FOREBAY_BF16>)                              \
  X(forebay_fill_fp16, Fill<FOREBAY_F16>)                               \
  X(forebay_adamw_fp32, AdamW<FOREBAY_F32, FOREBAY_F32, false>)         \
  X(forebay_adamw_fp32_fp32, AdamW<FOREBAY_F32, FOREBAY_F32, true>)     \
  X(forebay_adamw_fp32_bf16, AdamW<FOREBAY_F32, FOREBAY_BF16, true>)    \
  X(forebay_adamw_fp32_fp16, AdamW<FOREBAY_F32, FOREBAY_F16, true>)     \
  X(forebay_adamw_bf16, AdamW<FOREBAY_BF16, FOREBAY_F32, false>)        \
  X(forebay_adamw_bf16_fp32, AdamW<FOREBAY_BF16, FOREBAY_F32, true>)    \
  X(forebay_adamw_bf16_bf16, AdamW<FOREBAY_BF16, FOREBAY_BF16, true>)   \
  X(forebay_adamw_bf16_fp16, AdamW<FOREBAY_BF16, FOREBAY_F16, true>)    \
  X(forebay_adamw_fp16, AdamW<FOREBAY_F16, FOREBAY_F32, false>)         \
  X(forebay_adamw_fp16_fp32, AdamW<FOREBAY_F16, FOREBAY_F32, true>)     \
  X(forebay_adamw_fp16_bf16, AdamW<FOREBAY_F16, FOREBAY_BF16, true>)    \
  X(forebay_adamw_fp16_fp16, AdamW<FOREBAY_F16, FOREBAY_F16, true>)     \
  X(forebay_update_fp32, Update<FOREBAY_F32, FOREBAY_F32, false>)       \
  X(forebay_update_fp32_fp32, Update<FOREBAY_F32, FOREBAY_F32, true>)   \
  X(forebay_update_fp32_bf16, Update<FOREBAY_F32, FOREBAY_BF16, true>)  \
  X(forebay_update_fp32_fp16, Update<FOREBAY_F32, FOREBAY_F16, true>)   \
  X(forebay_update_bf16, Update<FOREBAY_BF16, FOREBAY_F32, false>)      \
  X(forebay_update_bf16_fp32, Update<FOREBAY_BF16, FOREBAY_F32, true>)  \
  X(forebay_update_bf16_bf16, Update<FOREBAY_BF16, FOREBAY_BF16, true>) \
  X(forebay_update_bf16_fp16, Update<FOREBAY_BF16, FOREBAY_F16, true>)  \
  X(forebay_update_fp16, Update<FOREBAY_F16, FOREBAY_F32, false>)       \
  X(forebay_update_fp16_fp32, Update<FOREBAY_F16, FOREBAY_F32, true>)   \
  X(forebay_update_fp16_bf16, Update<FOREBAY_F16, FOREBAY_BF16, true>)  \
  X(forebay_update_fp16_fp16, Update<FOREBAY_F16, FOREBAY_F16, true>)

// X(name, struct of adafactor.h, blocks.h or muon.h)
#define FOREBAY_BLOCK_KERNELS(X)                                              \
  X(forebay_norm_leaves_fp32, NormLeaves<FOREBAY_F32>)                        \
  X(forebay_norm_leaves_bf16, NormLeaves<FOREBAY_BF16>)                       \
  X(forebay_norm_leaves_fp16, NormLeaves<FOREBAY_F16>)                        \
  X(forebay_norm_tree, NormTree)                                              \
  X(forebay_step_control, StepControl)                                        \
  X(forebay_kept_update_fp32, KeptUpdate<::forebay::MomentFormat::kFloat32>)  \
  X(forebay_kept_update_bf16, KeptUpdate<::forebay::MomentFormat::kBfloat16>) \
  X(forebay_kept_update_block8, KeptUpdate<::forebay::MomentFormat::kBlock8>) \
  X(forebay_muon_momentum, MuonMomentum)                                      \
  X(forebay_muon_update, MuonUpdate)                                          \
  X(forebay_matrix_squares, MatrixSquares)                                    \
  X(forebay_matrix_norm, MatrixNorm)                                          \
  X(forebay_matrix_move, MatrixMove)                                          \
  X(forebay_matrix_gram, MatrixProduct<ProductKind::kGram>)                   \
  X(forebay_matrix_polynomial, MatrixProduct<ProductKind::kPolynomial>)       \
  X(forebay_matrix_step, MatrixProduct<ProductKind::kStep>)                   \
  X(forebay_factor_rows, FactorRows)                                          \
  X(forebay_factor_columns, FactorColumns)                                    \
  X(forebay_factor_renewal, FactorRenewal)                                    \
  X(forebay_factor_means, FactorMeans)                                        \
  X(forebay_keep_factors, KeepFactors)                                        \
  X(forebay_leaves_of_updates, FactoredLeaves<true>)                          \
  X(forebay_leaves_of_parameters, FactoredLeaves<false>)                      \
  X(forebay_chain, Chain)                                                     \
  X(forebay_adafactor_step, AdafactorStep)                                    \
  X(forebay_factored_update, FactoredUpdate)
