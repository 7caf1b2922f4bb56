/* A libcublasLt for a machine without one: every matrix product says that it is not initialized.

   cuDNN ends the process where it cannot find these symbols, though no convolution engine that it
   lists needs them. See offline.py. */

enum { NOT_INITIALIZED = 1 };

#define REFUSES(name) int name(void) { return NOT_INITIALIZED; }

unsigned long cublasLtGetVersion(void) { return VERSION; }

REFUSES(cublasLtCreate)
REFUSES(cublasLtDestroy)
REFUSES(cublasLtGetProperty)
REFUSES(cublasLtGroupedMatrixLayoutCreate)
REFUSES(cublasLtMatmul)
REFUSES(cublasLtMatmulAlgoGetHeuristic)
REFUSES(cublasLtMatmulDescCreate)
REFUSES(cublasLtMatmulDescDestroy)
REFUSES(cublasLtMatmulDescGetAttribute)
REFUSES(cublasLtMatmulDescInit_internal)
REFUSES(cublasLtMatmulDescSetAttribute)
REFUSES(cublasLtMatmulPreferenceCreate)
REFUSES(cublasLtMatmulPreferenceDestroy)
REFUSES(cublasLtMatmulPreferenceInit_internal)
REFUSES(cublasLtMatmulPreferenceSetAttribute)
REFUSES(cublasLtMatrixLayoutCreate)
REFUSES(cublasLtMatrixLayoutDestroy)
REFUSES(cublasLtMatrixLayoutGetAttribute)
REFUSES(cublasLtMatrixLayoutInit_internal)
REFUSES(cublasLtMatrixLayoutSetAttribute)
REFUSES(cublasLtMatrixTransform)
REFUSES(cublasLtMatrixTransformDescCreate)
REFUSES(cublasLtMatrixTransformDescDestroy)
REFUSES(cublasLtMatrixTransformDescGetAttribute)
REFUSES(cublasLtMatrixTransformDescInit_internal)
REFUSES(cublasLtMatrixTransformDescSetAttribute)
