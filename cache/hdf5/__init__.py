"""Cache in a folder of HDF5 files: HDF5Cache over one DeviceStore per kind of device."""
