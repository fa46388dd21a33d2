# The public names, for type checkers; __init__.py has them once more, and a test compares.

from sok_lite import communication as communication
from sok_lite import distributed_variable as distributed_variable
from sok_lite import dump_load as dump_load
from sok_lite import dynamic_embedding as dynamic_embedding
from sok_lite import dynamic_variable as dynamic_variable
from sok_lite import elastic as elastic
from sok_lite import keras as keras
from sok_lite import kv_variable as kv_variable
from sok_lite import lookup as lookup
from sok_lite import metrics as metrics
from sok_lite import optimizer as optimizer
from sok_lite import optimizers as optimizers
from sok_lite import plots as plots
from sok_lite import raw_ops as raw_ops
from sok_lite import utils as utils
from sok_lite.bridge.inference import inference_mode as inference_mode
from sok_lite.bridge.optimizer_states import optimizer_states as optimizer_states
from sok_lite.bridge.report import report as report
from sok_lite.bridge.serving.function import export_serving as export_serving
from sok_lite.bridge.serving.graph import export_serving_graph as export_serving_graph
from sok_lite.bridge.serving.publish import publish as publish
from sok_lite.bridge.strings import hash_strings as hash_strings
from sok_lite.engine.files.readonly import open_readonly as open_readonly
from sok_lite.engine.files.versions import rollback as rollback
from sok_lite.reports.report import Report as Report
from sok_lite.sok.autosave import Autosave as Autosave
from sok_lite.sok.communication import init as init
from sok_lite.sok.communication import set_comm_tool as set_comm_tool
from sok_lite.sok.dump_load import dump as dump
from sok_lite.sok.dump_load import incremental_model_dump as incremental_model_dump
from sok_lite.sok.dump_load import load as load
from sok_lite.sok.dump_load import log_removals as log_removals
from sok_lite.sok.dynamic_variable import DynamicVariable as DynamicVariable
from sok_lite.sok.lookup import all2all_dense_embedding as all2all_dense_embedding
from sok_lite.sok.lookup import lookup_sparse as lookup_sparse
from sok_lite.sok.lookup import sparse_read_and_evict as sparse_read_and_evict
from sok_lite.sok.optimizer import SGD as SGD
from sok_lite.sok.optimizer import OptimizerWrapper as OptimizerWrapper
from sok_lite.sok.static_variable import DistributedVariable as DistributedVariable
from sok_lite.sok.static_variable import LocalizedVariable as LocalizedVariable
from sok_lite.sok.static_variable import Variable as Variable
from sok_lite.sok.table_functions import assign as assign
from sok_lite.sok.table_functions import export as export
from sok_lite.sok.table_functions import filter_variables as filter_variables

__version__: str
tf_version: list[int]
