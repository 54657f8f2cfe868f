"""Our models inside servers: vLLM on a CPU, and the native form of vllm-neuron on Trainium.

Nothing here imports a server before it runs inside one.
"""
