from aioshm.testing.helpers import Leftovers as Leftovers
from aioshm.testing.helpers import leaving_no_task as leaving_no_task
from aioshm.testing.helpers import pair as pair
from aioshm.testing.helpers import readers as readers
