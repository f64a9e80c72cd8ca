import faulthandler

faulthandler.enable()
